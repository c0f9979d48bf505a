#!/bin/bash
# infra/restore.sh files BACKUP DIR, then, with DIR's Postgres new and up, infra/restore.sh databases BACKUP in DIR.
set -euo pipefail
umask 077
usage="usage: restore.sh files BACKUP DIR | restore.sh databases BACKUP"
backup=$(realpath "${2:?$usage}")
in_postgres=${IN_POSTGRES-docker compose exec -T postgres}
(cd "$backup" && sha256sum --check --quiet SHA256SUMS)

case $1 in
files)
    folder=${3:?$usage}
    [ -z "$(ls --almost-all "$folder" 2>/dev/null)" ] || { echo "$folder is not empty: restore into a new one" >&2; exit 2; }
    mkdir --parents "$folder"
    tar --extract --file "$backup/files.tar" --directory "$folder" --same-permissions
    ;;
databases)
    for database in prefect mlflow mlflow_auth; do
        $in_postgres pg_restore --username postgres --dbname "$database" --role "${database%_auth}" --no-owner \
            --single-transaction --exit-on-error <"$backup/$database.dump"
    done
    ;;
*) echo "$usage" >&2; exit 2 ;;
esac
