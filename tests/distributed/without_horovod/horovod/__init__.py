"""Stands before the installed Horovod on the path of ranks that must do without it."""

raise ImportError("this launch is one without Horovod")
