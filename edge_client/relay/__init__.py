"""The relay between devices and their coordinator: takes updates of devices, checks and folds them, and passes on the result."""
