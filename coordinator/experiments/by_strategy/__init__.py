"""What single strategies ask of an experiment: classes of clients with models of their own, and data of the server."""
