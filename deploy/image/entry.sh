#!/bin/sh
# hiddenq-entry COMMAND [ARGUMENTS]: check this machine for the command's role, then become it.
#
# A finding of level "error" ends the container with exit status 2 and one line that says what to do; warnings are
# printed and the service starts. HIDDENQ_PREFLIGHT=off skips the check. Files are made for the group: the spool, the
# output and the caches are shared by roles that run as different users.
set -eu
umask 0002

# The machine's name, not the container's, which is another at every start.
if [ -z "${HIDDENQ_HOST:-}" ] && [ -r /etc/hiddenq-host ]; then
    HIDDENQ_HOST=$(cat /etc/hiddenq-host)
    export HIDDENQ_HOST
fi

case "${1:-}" in
    produce | worker | upload | monitor)
        if [ "${HIDDENQ_PREFLIGHT:-on}" != off ]; then
            python -m hiddenq.doctor "$1"
        fi
        ;;
esac

exec hiddenq "$@"
