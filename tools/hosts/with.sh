#!/usr/bin/env bash
# with.sh "STARTER… PROGRAM" "OPTIONS" COMMAND ARGS…: runs `STARTER… PROGRAM COMMAND OPTIONS ARGS…`; for check.sh.
read -ra before <<<"$1"
read -ra options <<<"$2"
command=$3
shift 3
exec "${before[@]}" "$command" "${options[@]}" "$@"
