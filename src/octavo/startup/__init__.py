"""Starting an engine: reads a checkpoint's files, and starts the process that runs the core."""
