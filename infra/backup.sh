#!/bin/bash
# infra/backup.sh TARGET, called in the stack's folder while it runs: both servers' databases, then artifacts, runs and
# secrets, into the new folder TARGET, which only its owner may read. docs/operations.md has the way back.
#
# Databases first: what they name is then in the files, which may hold a little more.
set -euo pipefail
umask 077
target=${1:?usage: backup.sh TARGET}
[ -f .env ] && [ -d secrets ] || { echo "$PWD is no stack's folder: cd to where \`shardline stack init\` made it" >&2; exit 2; }
[ ! -e "$target" ] || { echo "$target is there already: give a new name" >&2; exit 2; }
in_postgres=${IN_POSTGRES-docker compose exec -T postgres}

rm -rf "$target.part"
mkdir "$target.part"
for database in prefect mlflow mlflow_auth; do
    $in_postgres pg_dump --username postgres --format custom "$database" >"$target.part/$database.dump"
done
# 1: a file changed or went while it was read, as those of runs under way do.
tar --create --file "$target.part/files.tar" .env secrets prefect artifacts home || [ $? = 1 ]
(cd "$target.part" && sha256sum ./*.dump files.tar >SHA256SUMS)
mv "$target.part" "$target"
echo "$target: $(du --human-readable --summarize "$target" | cut -f 1)"
