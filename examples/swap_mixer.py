"""Replace the attention of a timm model by SimA, insert context broadcasting, and count the cost."""

import timm
import torch

import tokamix

model = timm.create_model("deit_tiny_patch16_224", pretrained=False, num_classes=10)  # True downloads timm's weights
before = tokamix.count_macs(model, 224), sum(tokamix.count_exp(model, 224).values())

report = tokamix.swap_mixer(model, to="sima", relu=True)  # in place; every weight of the model is kept
print(report)
after = tokamix.count_macs(model, 224), sum(tokamix.count_exp(model, 224).values())
print(f"multiply-accumulates {before[0]:,} -> {after[0]:,}; evaluations of exp {before[1]:,} -> {after[1]:,}")

tokamix.insert_context_broadcast(model, kind="cb")  # averages every token with the mean token, after each MLP
logits = model(torch.randn(2, 3, 224, 224))
print(logits.shape)

tokamix.remove_context_broadcast(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # from here on: fine-tune as usual
loss = torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 224, 224)), torch.tensor([3, 7]))
loss.backward()
optimizer.step()
