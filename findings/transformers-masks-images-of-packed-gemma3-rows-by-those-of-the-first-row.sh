#!/usr/bin/env bash
# transformers 5.24.0: in packed rows of Gemma 3 the sliding layers look up which tokens are of one image at places of the first row.
#
# Tokens of an image attend to each other in both directions. create_masks_for_vision_model gives the groups of images to the mask of
# sliding layers as an or_mask_function, and create_causal_mask, which sees from position ids that restart that rows are packed, calls
# that function with positions within a row, where it indexes groups of the whole line. So the images of a later row are masked by what
# stands at these places of the first one: here its text, so that the image is read causally. Full layers are right, and nothing warns.
#
# Fails if the sliding mask of a packed row is that of the same row alone, or if the full mask is not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

config = Gemma3TextConfig(hidden_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, sliding_window=16)
config._attn_implementation = "sdpa"


def masks(types, positions):
    return create_masks_for_vision_model(
        config=config, inputs_embeds=torch.zeros(1, len(types), 8), attention_mask=None, cache=None,
        position_ids=torch.tensor([positions]), block_sequence_ids=get_block_sequence_ids_for_mask(torch.tensor([types])),
    )


row = [0, 1, 1, 1, 0]  # an image of three tokens, between texts
alone, packed = masks(row, [0, 1, 2, 3, 4]), masks([0] * 5 + row, [0, 1, 2, 3, 4] * 2)
for kind in ("full_attention", "sliding_attention"):
    inside = packed[kind][0, 0, 5:, 5:].bool()
    print(kind, "is that of the row alone:", torch.equal(inside, alone[kind][0, 0].bool()))
    print(inside.int())
assert torch.equal(packed["full_attention"][0, 0, 5:, 5:].bool(), alone["full_attention"][0, 0].bool())
assert not torch.equal(packed["sliding_attention"][0, 0, 5:, 5:].bool(), alone["sliding_attention"][0, 0].bool()), "mended"
P
# Seen: full_attention is that of the row alone: True; sliding_attention: False, a lower triangle.
echo "seen as described"
