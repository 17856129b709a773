"""The ranks of a job: who they are, their rendezvous, and the network between them."""
