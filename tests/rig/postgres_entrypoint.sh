#!/bin/bash
# For tests without a registry: what the documentation of Postgres' official image promises and compose.yaml asks for.
set -euo pipefail
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    # shellcheck disable=SC2086  # several words
    initdb --username=postgres --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS "$PGDATA"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl --pgdata "$PGDATA" --options "-c listen_addresses=" --wait start
    for script in /docker-entrypoint-initdb.d/*.sh; do "$script"; done
    pg_ctl --pgdata "$PGDATA" --mode fast --wait stop
fi
exec "$@" -c listen_addresses='*'
