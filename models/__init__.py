"""Models from catalog to release; shared here are the catalog, job files and loading of user code."""
