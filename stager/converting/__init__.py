"""Reading the command lines of single-node launchers."""
