"""Replayed experts: the choice is the earlier pass's; gates and gradients are of the present router."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from slipstream.backend.megatron.router import RouteReplay

TOKENS, EXPERTS, TOP_K = 7, 8, 2
KINDS = ("softmax", "softmax of all", "sigmoid")


def logits_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(TOKENS, EXPERTS, requires_grad=True)


def routed(replay: RouteReplay, logits: torch.Tensor, kind: str) -> torch.Tensor:
    gates, _ = topk_routing_with_score_function(
        logits,
        TOP_K,
        use_pre_softmax=kind == "softmax of all",
        score_function=kind.split()[0],
        expert_bias=torch.linspace(0, 1, EXPERTS) if kind == "sigmoid" else None,
        router_replay=replay,  # pyright: ignore[reportArgumentType]
    )
    return gates


def kept_routes(kind: str) -> torch.Tensor:
    replay = RouteReplay()
    with torch.no_grad():
        routed(replay, logits_of(0), kind)
    assert replay.chosen_tk is not None
    return replay.chosen_tk


def forced_gates(logits: torch.Tensor, routes: torch.Tensor, kind: str) -> torch.Tensor:
    """The gates of forced experts as transformers' mixtures compute them, in float64."""
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, routes.long(), True)
    if kind == "softmax":
        return torch.where(chosen, logits, -torch.inf).softmax(-1)
    scores = logits.softmax(-1) if kind == "softmax of all" else logits.sigmoid()
    gates = torch.where(chosen, scores, 0)
    return gates if kind == "softmax of all" else gates / gates.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_and_gradients_are_those_of_forced_experts(kind: str):
    routes, logits, replay = kept_routes(kind), logits_of(1), RouteReplay()
    assert routes.dtype == torch.uint8
    replay.begin(routes, trains=True)
    gates = routed(replay, logits, kind)
    expected_logits = logits.detach().double().requires_grad_()
    expected = forced_gates(expected_logits, routes, kind)
    weight = torch.arange(TOKENS * EXPERTS).reshape(TOKENS, EXPERTS) / 10
    (gates * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(gates.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits.grad.double(), expected_logits.grad, atol=2e-6, rtol=0)
    assert not torch.equal(gates > 0, routed(RouteReplay(), logits_of(1), kind) > 0)


def test_a_checkpointed_layer_takes_each_micro_batch_of_a_pipeline_to_its_own_experts():
    own = [kept_routes("softmax"), None, kept_routes("sigmoid")]
    replay, logits, forward = RouteReplay(), logits_of(1), []
    for routes in own:
        replay.begin(routes, trains=True)
        with torch.no_grad():
            forward.append(routed(replay, logits, "softmax"))
    for gates in forward:
        torch.testing.assert_close(routed(replay, logits, "softmax"), gates)
    assert not torch.equal(forward[0] > 0, forward[1] > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_routes_goes_where_the_present_router_sends_it(kind: str):
    routes, logits, replay = kept_routes(kind).to(torch.int16), logits_of(1), RouteReplay()
    routes[2:4] = -1
    replay.begin(routes, trains=True)
    gates, own = routed(replay, logits, kind), routed(RouteReplay(), logits, kind)
    assert replay.chosen_tk is not None
    torch.testing.assert_close(gates[2:4], own[2:4])
    routes[2:4] = replay.chosen_tk[2:4]
    expected = forced_gates(logits.detach().double(), routes, kind)
    torch.testing.assert_close(gates.double(), expected, atol=1e-6, rtol=0)


def test_routes_of_another_micro_batch_are_an_error():
    replay = RouteReplay()
    replay.begin(kept_routes("softmax")[1:], trains=True)
    with pytest.raises(RuntimeError, match="expected \\(7, 2\\)"):
        routed(replay, logits_of(1), "softmax")
