"""`--moe-token-dispatcher-type hierarchical`: a token crosses the network once per node.

The steps are those that `MoELayer` asks of a dispatcher, in their order. Shapes: S sequence, B
batch, T = S * B tokens of this rank, H values a token, E experts of which L are here, k experts a
token at most, R rows that come to this rank, M rows of its experts.
"""

from typing import Any

import torch

from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.efa.expert import settings
from megatron.efa.expert.counts import Exchange
from megatron.efa.expert.functions import Combine, Dispatch, Expand, Reduce, Trip
from megatron.efa.expert.local import local_of
from megatron.efa.expert.place import place_of
from megatron.efa.expert.transport import Way


class HierarchicalTokenDispatcher(MoETokenDispatcher):
    """Between nodes along rails, then inside the node, then to the experts of the rank."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
    ) -> None:
        """As upstream's dispatchers; splits the expert-parallel group by node, so that all of its
        ranks must make one."""
        super().__init__(config=config, pg_collection=pg_collection)
        self.local, self.first = num_local_experts, local_expert_indices[0]
        self.place = place_of(self.ep_group)
        self.topk = min(config.moe_router_topk, config.num_moe_experts)
        self.chunks: int | None = settings.chunks()
        """Chunks that tokens are cut into; None: by the size of what crosses the network. The same
        on all ranks."""
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity
        self.moe_expert_capacity_factor = config.moe_expert_capacity_factor

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, B, H], bool [T, E], [T, E] -> [T, H], [T, k]; sends the counts on their way."""
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        if self.drop_and_pad:
            # Fills an expert up with tokens of weight 0. They need not travel: see `_filled`.
            routing_map = routing_map & (probs != 0)
        ranks = routing_map.view(-1, self.place.ranks, self.local).any(2)
        self._nodes = ranks.view(-1, self.place.nodes, self.place.per_node).any(2)
        self._own_chunks = self.chunks or settings.chunks_for(
            self.place, len(tokens) * tokens.shape[1] * tokens.element_size(), tokens.is_cuda
        )
        width = self.chunks or settings.MOST_CHUNKS
        self._exchange = Exchange(self.place, self.local, width, self.topk)
        self._exchange.start(ranks, routing_map, self._own_chunks)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._experts, weights = _compact(routing_map, probs, self.topk)
        if self.config.overlap_moe_expert_parallel_comm:
            # The schedule frees what the next step was given, and these are still the layer's.
            tokens = tokens.clone()
        return tokens, weights

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H], [T, k] -> [R, H], [R, k]."""
        self._counts = self._exchange.wait()
        way = Way(self.place, self._counts, self._nodes, self._own_chunks)
        trip = self._trip = Trip(way, self._ranks_of, settings.fp8())
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        rows, weights = Dispatch.apply(hidden_states, probs, self._experts, trip)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        way.arriving.wait()
        self._exchange = self._experts = self._nodes = None
        return rows, weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[R, H], [R, k] -> rows by local expert [M, H], tokens of each [L], weights [M]."""
        experts, tokens = self._trip.experts, self._counts.experts
        if self.tp_size > 1:
            hidden_states, probs, experts, tokens = self._gathered(hidden_states, probs, experts)
        self._local = local_of(experts, self.first, tokens, self._filled(tokens))
        rows, weights = Expand.apply(hidden_states, probs, self._local)
        return rows, self._local.counts, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [R, H], weighted already by the experts."""
        if self.tp_size == 1:
            return Reduce.apply(hidden_states, self._local, hidden_states.dtype)
        # Parts of sums over the experts' tensor-parallel ranks: rounded after they are whole.
        rows = Reduce.apply(hidden_states, self._local, torch.float32)
        rows = reduce_scatter_to_sequence_parallel_region(
            rows, group=self.tp_group, input_split_sizes=self._tp_rows
        )
        return rows.to(hidden_states.dtype)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [T, H]."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        way = self._trip.way
        self._trip = self._counts = self._local = None
        tokens = Combine.apply(hidden_states, way)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(tokens)
            self.shared_experts.post_forward_comm()
        way.arriving.wait()
        return tokens

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [S, B, H], with the shared experts' output."""
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _ranks_of(self, experts: torch.Tensor) -> torch.Tensor:
        """bool [n, P] of experts int16 [n, k]: the ranks of this node that have one of them."""
        per_node = self.place.per_node
        rank = torch.div(experts.long(), self.local, rounding_mode="floor")
        rank = rank - self.place.node * per_node
        here = (rank >= 0) & (rank < per_node)
        mask = torch.zeros(len(rank), per_node + 1, dtype=torch.bool, device=rank.device)
        return mask.scatter_(1, torch.where(here, rank, per_node), True)[:, :per_node]

    def _gathered(
        self, rows: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of all ranks that share this rank's experts, each with a slice of every one."""
        said = torch.cat([torch.tensor([len(rows)]), self._counts.experts]).to(rows.device)
        heard = torch.empty(self.tp_size * len(said), dtype=said.dtype, device=rows.device)
        torch.distributed.all_gather_into_tensor(heard, said, group=self.tp_group)
        heard = heard.view(self.tp_size, -1).cpu()
        self._tp_rows = heard[:, 0].tolist()
        rows, probs, experts = (
            gather_from_sequence_parallel_region(
                part.contiguous(), group=self.tp_group, output_split_sizes=self._tp_rows
            )
            for part in (rows, probs, experts.to(torch.int32))
        )
        return rows, probs, experts, heard[:, 1:].sum(0)

    def _filled(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows that each local expert is to have, int64 [L] on the host, of its `tokens`."""
        if self.drop_and_pad:
            # As many as upstream gives: C of every rank. With weight 0, whatever is in them.
            own = len(self.routing_map) * self.config.moe_router_topk
            capacity = get_capacity(
                own, self.config.num_moe_experts, self.moe_expert_capacity_factor
            )
            return tokens.clamp(min=capacity * self.tp_size * self.ep_size)
        if self.config.moe_router_padding_for_quantization:
            multiple = max(get_align_size_for_quantization(self.config), 1)
            return -(-tokens // multiple) * multiple
        return tokens


def _compact(
    routing_map: torch.Tensor, probs: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [T, E], [T, E] -> experts int16 [T, k], in rising order, -1 for none; weights [T, k]."""
    total = routing_map.shape[1]
    place = torch.where(routing_map, routing_map.cumsum(1) - 1, topk).clamp(max=topk)
    experts = torch.full((len(place), topk + 1), total, device=place.device)
    numbers = torch.arange(total, device=place.device).expand_as(place)
    experts = experts.scatter_(1, place, numbers)[:, :topk]
    none = experts == total
    weights = probs.gather(1, experts.clamp(max=total - 1)).masked_fill(none, 0)
    return experts.masked_fill(none, -1).to(torch.int16), weights
