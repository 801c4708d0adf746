"""Files of the coordinator: blobs, partial uploads, private folders, and disk errors."""
