"""Reports: progress of a run, and the files it leaves in its folder."""
