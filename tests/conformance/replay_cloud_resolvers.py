"""Performs the recorded programs about resolvers that ask a service: the official clients ask servers of tests/."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

from conformance.replay_resolvers import resolver_fields
from mpistrat.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    TPUClusterResolver,
)
from support.cloud.compute_engine_api import PLACE, compute_engine
from support.cloud.kubernetes_api import pod_server

Case = dict[str, Any]


def _kubernetes_resolver(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    if "client" in inputs:  # the recorded one had no client library
        with mock.patch.object(importlib.util, "find_spec", return_value=None):
            return resolver_fields(KubernetesClusterResolver())
    recorded = inputs["pods_by_selector [name, host_ip, phase]"]
    pods = {
        selector: [
            (name, host, *phase) if phase else (name, host, "Running")
            for name, host, *phase in listed
        ]
        for selector, listed in recorded.items()
    }
    with pod_server(pods) as server:
        resolver = KubernetesClusterResolver(
            inputs["job_to_label_mapping"], inputs["port"], override_client=server.client()
        )
        return resolver_fields(resolver)


def _gce_resolver(case: Case) -> dict[str, object]:
    inputs = case["inputs"]
    if "service" in inputs:  # the recorded one had no client library
        with mock.patch.object(importlib.util, "find_spec", return_value=None):
            return resolver_fields(GCEClusterResolver(**PLACE, port=8470))
    addresses = {
        name: [listed] if isinstance(listed, str) else listed
        for name, listed in inputs["instances"].items()
    }
    with compute_engine(addresses) as server:
        arguments = {**PLACE, **server.client_arguments(), **inputs["kwargs"]}
        return resolver_fields(GCEClusterResolver(port=inputs["port"], **arguments))


def _gce_set_task_type(case: Case) -> None:
    GCEClusterResolver(**PLACE, port=8470).task_type = "other"


def _tpu_resolver(case: Case) -> dict[str, object]:
    resolver = TPUClusterResolver(case["inputs"]["tpu"])
    return {
        **resolver_fields(resolver),
        "num_accelerators": resolver.num_accelerators(),
        "job": resolver.task_type,
    }


HANDLERS: dict[str, Callable[[Case], object]] = {
    "kubernetes_resolver": _kubernetes_resolver,
    "gce_resolver": _gce_resolver,
    "gce_set_task_type": _gce_set_task_type,
    "tpu_resolver": _tpu_resolver,
}
