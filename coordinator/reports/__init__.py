"""Reports: progress of a run, the files it leaves in its folder, and its copies in experiment trackers."""
