"""The server: chooses cohorts, accepts updates, commits rounds."""
