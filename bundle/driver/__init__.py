"""The driver: takes all nodes of an allocation through the phases of a job."""
