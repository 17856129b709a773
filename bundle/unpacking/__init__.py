"""How an environment is made of layers: their format, their files, the tree they become."""
