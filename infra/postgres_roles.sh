#!/bin/bash
# Run once, by Postgres' image when the cluster is new: a role and a database for each server, neither can see the
# other's. psql reads the passwords from their files, so that they are in no process list.
set -euo pipefail
secrets=${SECRETS_DIR:-/run/secrets}
psql --quiet --no-psqlrc --set ON_ERROR_STOP=1 --username postgres --dbname postgres <<SQL
\set prefect_password \`cat $secrets/prefect_database_password\`
\set mlflow_password \`cat $secrets/mlflow_database_password\`
create role prefect login password :'prefect_password';
create role mlflow login password :'mlflow_password';
create database prefect owner prefect;
create database mlflow owner mlflow;
create database mlflow_auth owner mlflow;
revoke connect on database prefect, mlflow, mlflow_auth from public;
SQL
