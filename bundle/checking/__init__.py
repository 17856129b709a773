"""How ``verify --deep`` checks: files, names, clocks, ways, and whose fault something is."""
