"""The oracle of the step driver: the stock model with the stock cache, stepped with equal seats.

The interface of StepDriver as far as the tests use it, over plain tensors. Each step assembles a
stock cache for the active requests in the order of their rows, padded on the left to the longest.
"""

from __future__ import annotations

from tiny_glm import cache_argument, torch

# isort: split
from transformers import DynamicCache

NAMES = ("keys", "values", "indexer_keys")


class StockRequest:
    def __init__(self, layers, length, max_new_tokens, row):
        self.layers, self.length, self.max_new_tokens = layers, length, max_new_tokens
        self.row = row  # None while suspended or finished
        self.tokens = []


class StockDriver:
    def __init__(self, model, max_rows, eos_token_id=None):
        self.model, self.max_rows, self.eos_token_id = model, max_rows, eos_token_id
        self.requests = []
        self.logits = []

    def add(self, prompt, max_new_tokens):
        row = self._free_row()
        cache = DynamicCache(config=self.model.config)
        ids = self._tensor([prompt])
        logits = self._forward(ids, torch.ones_like(ids), cache)
        request = StockRequest(self._layers(cache, 0, 0), len(prompt), max_new_tokens, row)
        self.requests.append(request)
        self._note(request, logits[0])
        return request

    def suspend(self, request):
        request.row = None

    def resume(self, request):
        request.row = self._free_row()

    def remove(self, request):
        request.row = None

    def step(self):
        active = sorted((r for r in self.requests if r.row is not None), key=lambda r: r.row)
        if not active:
            return {}
        longest = max(request.length for request in active)
        padding = self._tensor([longest - request.length for request in active])
        cache = DynamicCache(config=self.model.config)
        for index, layer in enumerate(cache.layers):
            self._fill(layer, [r.layers[index] for r in active], padding.tolist())
        mask = (torch.arange(longest + 1, device=padding.device) >= padding[:, None]).long()
        ids = self._tensor([[request.tokens[-1]] for request in active])
        logits = self._forward(ids, mask, cache)
        for i, request in enumerate(active):
            request.layers = self._layers(cache, i, int(padding[i]))
            request.length += 1
        return {request: self._note(request, logits[i]) for i, request in enumerate(active)}

    def _tensor(self, values):
        return torch.tensor(values, device=self.model.device)

    def _forward(self, ids, mask, cache):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(self.model): cache},
            )
        self.logits.append(output.logits[:, -1].clone())
        return self.logits[-1]

    def _fill(self, layer, sources, padding):
        layer.is_initialized = True
        for name in NAMES:
            rows = [source[name] for source in sources]
            if rows[0] is None:
                continue
            padded = [
                torch.nn.functional.pad(row, (0, 0, pad, 0))
                for row, pad in zip(rows, padding, strict=True)
            ]
            setattr(layer, name, torch.stack(padded))
            layer.is_indexer_initialized |= name == "indexer_keys"

    def _layers(self, cache, row, padding):
        def own(tensor):
            return None if tensor is None else tensor[row][..., padding:, :].clone()

        return [{name: own(getattr(layer, name)) for name in NAMES} for layer in cache.layers]

    def _note(self, request, logits):
        token = int(logits.argmax())
        request.tokens.append(token)
        if len(request.tokens) == request.max_new_tokens or token == self.eos_token_id:
            request.row = None
        return token

    def _free_row(self):
        taken = {request.row for request in self.requests}
        return next(row for row in range(self.max_rows) if row not in taken)
