"""One layer from one source: a wheel, the project, an asset."""
