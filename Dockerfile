# A wheel is built in the first stage; the image has the wheel, the libraries of the lock, and no compiler.
#     docker build -t penstock .            it holds no pipeline: build your own image on it, with your application, or mount that
FROM python:3.13-slim AS build
RUN pip install --no-cache-dir build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY lua lua
COPY migrations migrations
RUN python -m build --wheel --outdir /wheels

FROM python:3.13-slim
LABEL org.opencontainers.image.title="Penstock" \
      org.opencontainers.image.description="A transactional outbox for Postgres, streamed through Redis, applied exactly once" \
      org.opencontainers.image.licenses="MIT"
# Nothing is written: the file system of a container may be read-only.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PENSTOCK_LISTEN=127.0.0.1:9310
COPY requirements-image.lock /
RUN pip install --no-cache-dir --require-hashes --requirement /requirements-image.lock
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/penstock_outbox-*.whl
USER 65532:65532
# Of stream, consume, work and run, which answer it; a command that ends is over before it is asked.
HEALTHCHECK --interval=10s --timeout=10s --start-period=15s --retries=3 \
    CMD ["penstock", "probe", "http://127.0.0.1:9310/livez"]
ENTRYPOINT ["penstock"]
CMD ["--help"]
