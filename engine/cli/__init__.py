"""What every command line needs: flags, exit codes, progress."""
