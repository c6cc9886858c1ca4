#!/bin/sh
# Two hosts with two processes each. The same line on both; the address is that of the first, and decides who is first:
#
#     sh examples/two_hosts.sh 10.0.0.1
#
# With a GPU per process the line is the same. More hosts: --num_machines, and the sum of all processes.
# HYBRID_SHARD keeps gathers inside a host: --strategy HYBRID_SHARD.
set -eu
exec fullshard launch --num_machines 2 --num_processes "${PROCESSES:-4}" --main_process_ip "$1" \
    "$(dirname "$0")/own_loop.py"
