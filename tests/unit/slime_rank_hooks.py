"""Hooks of slime's signatures for ranks, as a user would write them."""

from dataclasses import fields

import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, get_sum_of_sample_mean
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

# ---- what Slipstream does by default, as hooks


def capped_weights(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Truncated importance sampling."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, loss_masks, {"tis": ratio, "tis_clipfrac": (weight != ratio).int()}


def weights_of_one(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * torch.ones_like(pg_loss), loss_masks, {}


def mean_of_units(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return get_sum_of_sample_mean(
        total_lengths, response_lengths, loss_masks, calculate_per_token_loss=calculate_per_token_loss
    )


def advantages_of_rewards(args, rollout_data):
    like = rollout_data.get("log_probs") or rollout_data["rollout_log_probs"]
    values = [torch.full_like(x, reward) for x, reward in zip(like, rollout_data["rewards"], strict=True)]
    rollout_data["advantages"] = rollout_data["returns"] = values


def policy_loss(args, batch, logits, sum_of_sample_mean):
    """PPO's clipped loss with a truncated importance weight, from logits."""
    assert logits.dtype == torch.float32 and logits.shape[:2] == batch["tokens"].shape
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    _, values = get_log_probs_and_entropy(
        logits, args=args, **{name: batch[name] for name in names}, with_entropy=True
    )
    log_probs = torch.cat(values["log_probs"])
    old = torch.cat(batch["log_probs"]) if batch["log_probs"] else log_probs.detach()
    weight = (old - torch.cat(batch["rollout_log_probs"])).exp().clamp(max=args.tis_clip)
    ratio = (log_probs - old).exp()
    advantages = torch.cat(batch["advantages"])
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    loss = sum_of_sample_mean(weight * -torch.minimum(ratio * advantages, clipped * advantages))
    entropy = sum_of_sample_mean(torch.cat(values["entropy"]))
    metrics = {"pg_loss": loss.detach(), "entropy": entropy.detach()}
    return loss - args.entropy_coef * entropy, metrics


# ---- changes


def second_tokens_dropped(args, *, pg_loss, loss_masks, **kwargs):
    masks = [mask * (torch.arange(len(mask)) % 2 == 0) for mask in loss_masks]
    return pg_loss, masks, {"pg": pg_loss}


def halved_advantages(args, rollout_id, rollout_data):
    assert isinstance(rollout_id, int)
    rollout_data["advantages"] = [0.5 * values for values in rollout_data["advantages"]]


def loss_taken_away(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[1::2] = 0


def of_two_ranks(args, *, pg_loss, train_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    """Weighs each token by the mean of the whole response, which needs the tokens of other ranks."""
    whole = [
        all_gather_with_cp(part, total, response)
        for part, total, response in zip(train_log_probs, total_lengths, response_lengths, strict=True)
    ]
    means = [
        torch.full_like(part, float((values * mask).sum()))
        for part, values, mask in zip(train_log_probs, whole, loss_masks, strict=True)
    ]
    return pg_loss * torch.cat(means), loss_masks, {"mean": torch.cat(means)}


# ---- hostile ones


def everything_overwritten(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
):
    """Returns what weights of one give, and spoils all of its arguments."""
    result = pg_loss * 1.0, [mask.clone() for mask in loss_masks], {}
    for part in (*train_log_probs, *rollout_log_probs, *loss_masks):
        part.fill_(7)
    total_lengths.clear()
    response_lengths[:] = [0] * 99
    vars(args).clear()
    return result


def too_short(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss[:-1], loss_masks, {}


def not_a_number(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * float("nan"), loss_masks, {}


def masks_of_another_length(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss, [mask[1:] for mask in loss_masks], {}


def only_the_loss(args, *, pg_loss, **kwargs):
    return pg_loss


def raising(args, **kwargs):
    raise KeyError("tis_level")


def numbers_instead_of_a_function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return 0.5


def other_tokens(args, rollout_id, rollout_data):
    rollout_data["tokens"][0][0] += 1


def better_log_probs(args, rollout_id, rollout_data):
    rollout_data["rollout_log_probs"] = [0 * values for values in rollout_data["rollout_log_probs"]]


def no_advantages(args, rollout_data):
    rollout_data["returns"] = rollout_data["rollout_log_probs"]


def advantages_of_one_sample(args, rollout_data):
    rollout_data["advantages"] = rollout_data["rollout_log_probs"][:1]


def infinite_advantages(args, rollout_data):
    rollout_data["advantages"] = [values - float("inf") for values in rollout_data["rollout_log_probs"]]


def loss_of_every_sample(args, batch, logits, sum_of_sample_mean):
    return logits.sum(-1)[0], {}


# ---- Megatron's side


CALLS = []


def begin(args):
    import torch.distributed as dist

    assert dist.is_initialized() and args.num_layers == 4 and args.hidden_size > 0
    CALLS.append("init")


def before_log_prob(args, model, store_prefix):
    assert all(isinstance(part, torch.nn.Module) for part in model)
    CALLS.append(f"log_prob {store_prefix}")


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    assert opt_param_scheduler.get_lr(optimizer.param_groups[0]) > 0
    CALLS.append(f"train {rollout_id} {step_id}")


def begin_with_arguments(args):
    CALLS.append(args)


def provider(pre_process, post_process, vp_stage=None):
    """The standard model of Slipstream, with a mark of its own."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from slipstream.backend.megatron.layers import final_norm, layer_specs
    from slipstream.bridge.families import model_spec

    [args] = CALLS
    names = [each.name for each in fields(TransformerConfig) if each.init and each.name in vars(args)]
    geometry = model_spec(args.hf_checkpoint).geometry
    layers = TransformerBlockSubmodules(layer_specs(geometry, "local"), final_norm(geometry, "local"))
    return GPTModel(
        TransformerConfig(**{name: getattr(args, name) for name in names}),
        layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def no_model(pre_process, post_process):
    return torch.nn.Linear(2, 2)
