#!/usr/bin/env bash
# exec_words.sh "quoted command line": becomes that command. horovodrun mistakes the options of the
# command that it is to start for its own where they begin alike (--log, --min, ...), and stops.
eval "exec $1"
