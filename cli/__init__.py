"""The `opmux` command: one file a command, each of which prints what the other rooms return."""
