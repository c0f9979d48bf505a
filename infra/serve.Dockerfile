# The serving image: `shardline serve` with ONNX Runtime on CPUs and what it needs to reach an MLflow server; no torch,
# no Prefect: 0.53 GB. The versions are constraints.txt's.
#
#   docker build -f infra/serve.Dockerfile -t shardline-serve .
#   docker run -p 127.0.0.1:8000:8000 --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#       -e MLFLOW_TRACKING_URI=http://mlflow:5000 shardline-serve quickstart@champion
#
# It asks nobody for a token unless serving.token_file=FILE follows: who reaches the published port uses the model.
#
# For GPUs, with torch, and TensorRT to build engines where they run (`python -m training.build_engine EXPORT`); not
# built here yet: --build-arg EXTRAS=serve,train,tensorrt
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

FROM ${BASE_IMAGE} AS install
ARG PIP_INDEX_URL
ARG EXTRAS=serve
WORKDIR /opt/shardline/src
RUN python3 -m venv /opt/shardline/venv
ENV PATH=/opt/shardline/venv/bin:${PATH}
# The dependencies come before the code, so that after a change of code a build takes seconds.
COPY pyproject.toml constraints.txt README.md ./
RUN mkdir flows tasks infra training training/strategies \
 && pip install --no-cache-dir --constraint constraints.txt --editable ".[${EXTRAS}]"
COPY prefect.yaml ./
COPY flows ./flows
COPY tasks ./tasks
COPY infra ./infra
COPY training ./training
# A read-only container cannot keep .pyc files.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/shardline || true

FROM ${BASE_IMAGE}
COPY --from=install /opt/shardline /opt/shardline
RUN groupadd --gid 10001 shardline && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp shardline
# Downloaded versions go to SHARDLINE_HOME: mount a volume there to keep them over restarts.
ENV PATH=/opt/shardline/venv/bin:${PATH} HOME=/tmp USER=shardline PYTHONUNBUFFERED=1 SHARDLINE_HOME=/tmp/shardline
WORKDIR /opt/shardline/src
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=6 \
    CMD ["python", "-m", "infra.healthcheck", "http://127.0.0.1:8000/health/ready"]
# The last of --host wins, like any option's, so that what follows the image's name may change it.
ENTRYPOINT ["shardline", "serve", "--host", "0.0.0.0", "--port", "8000", "--without-tokens"]
