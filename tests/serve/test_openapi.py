"""The OpenAPI document tells the truth: schemathesis makes requests from it and compares the answers with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
import schemathesis
from helpers.explain_run import make_run
from helpers.serving import serving
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks

from likethat.runs.classifier import load


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(load(make_run(tmp_path_factory.mktemp("openapi")).path, "cpu")) as client:
        yield client


CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]


def test_answers_are_as_documented(client: httpx.Client) -> None:
    schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
    tried = set()
    for operation in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:

            @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
            @given(operation.ok().as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                tried.add(case.operation.path)
                case.call_and_validate(checks=CHECKS, timeout=300)

            with suppress(Unsatisfiable):  # nothing about a request without parameters can be wrong
                check()
    assert len(tried) == 5


def test_the_document_tells_of_all_that_programs_need(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {"/api/explain", "/api/prototypes", "/api/prototypes/{id}", "/health", "/metrics"}
    body = paths["/api/explain"]["post"]["requestBody"]["content"]
    assert {"multipart/form-data", "image/jpeg", "application/octet-stream"} <= set(body)
