"""The command line, one file a command. It parses, says and returns an exit status; the work is done elsewhere."""
