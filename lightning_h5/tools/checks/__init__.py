"""What ``check_files`` looks for: of one file, of all files together, and of every row."""
