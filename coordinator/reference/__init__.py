"""Reference pages generated from the code: commands, and the keys of files."""
