# A wheel is built in the first stage; the image has the wheel and what a worker needs, and no compiler.
FROM python:3.13-slim AS build
RUN pip install --no-cache-dir build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY lua lua
COPY migrations migrations
RUN python -m build --wheel --outdir /wheels

FROM python:3.13-slim
RUN useradd --system --create-home penstock
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/penstock-*.whl)[worker,prometheus]" httpx starlette uvicorn
USER penstock
ENTRYPOINT ["penstock"]
CMD ["--help"]
