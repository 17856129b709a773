"""A folder of wheels with an index, which pip, uv and stager itself can use inside an air gap."""
