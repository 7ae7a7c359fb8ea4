"""Published networks for ``loader_cost.py``, with the sizes of their papers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CountsVae", "MaskedTokens", "residual_network", "table_network"]


class ResidualBlock(nn.Module):
    """Two convolutions and the way around them, of images or signals."""

    def __init__(self, n_in: int, n_out: int, stride: int, *, is_1d: bool) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.BatchNorm1d) if is_1d else (nn.Conv2d, nn.BatchNorm2d)
        self.layers = nn.Sequential(
            conv(n_in, n_out, 3, stride, 1, bias=False),
            norm(n_out),
            nn.ReLU(),
            conv(n_out, n_out, 3, 1, 1, bias=False),
            norm(n_out),
        )
        self.around = (
            nn.Identity()
            if n_in == n_out and stride == 1
            else nn.Sequential(conv(n_in, n_out, 1, stride, bias=False), norm(n_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the next features."""
        return functional.relu(self.layers(x) + self.around(x))


def residual_network(n_in: int, n_classes: int, *, is_1d: bool = False) -> nn.Module:
    """Return ResNet-18 for images (He et al., 2016), or the same of one-dimensional convolutions for signals."""
    conv, norm, pool, mean = (
        (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d)
        if is_1d
        else (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)
    )
    layers: list[nn.Module] = [conv(n_in, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), pool(3, 2, 1)]
    n = 64
    for n_out in (64, 128, 256, 512):
        layers.append(ResidualBlock(n, n_out, 1 if n == n_out else 2, is_1d=is_1d))
        layers.append(ResidualBlock(n_out, n_out, 1, is_1d=is_1d))
        n = n_out
    return nn.Sequential(*layers, mean(1), nn.Flatten(), nn.Linear(n, n_classes))


class TableBlock(nn.Module):
    """A block of ``table_network``."""

    def __init__(self, width: int, n_hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, n_hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(n_hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the next features."""
        return x + self.layers(x)


def table_network(n_in: int, n_out: int, width: int = 512, n_blocks: int = 8) -> nn.Module:
    """Return a residual network for tables (Gorishniy et al., 2021)."""
    blocks = [TableBlock(width, 2 * width) for _ in range(n_blocks)]
    return nn.Sequential(nn.Linear(n_in, width), *blocks, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, n_out))


class CountsVae(nn.Module):
    """The variational autoencoder of scVI (Lopez et al., 2018), for counts of genes; its default sizes."""

    def __init__(self, n_genes: int, n_hidden: int = 128, n_latent: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_genes, n_hidden), nn.BatchNorm1d(n_hidden), nn.ReLU())
        self.moments = nn.Linear(n_hidden, 2 * n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent, n_hidden), nn.BatchNorm1d(n_hidden), nn.ReLU())
        self.shares = nn.Linear(n_hidden, n_genes)
        self.spread = nn.Parameter(torch.zeros(n_genes))

    def forward(self, counts: Tensor) -> Tensor:
        """Return the negative evidence lower bound."""
        mean, log_variance = self.moments(self.encoder(counts.log1p())).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        expected = self.shares(self.decoder(latent)).softmax(dim=1) * counts.sum(dim=1, keepdim=True)
        spread = self.spread.exp()
        log_sum = (spread + expected + 1e-8).log()
        likelihood = (
            spread * (spread.log() - log_sum)
            + counts * ((expected + 1e-8).log() - log_sum)
            + torch.lgamma(counts + spread)
            - torch.lgamma(spread)
            - torch.lgamma(counts + 1)
        )
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance)
        return divergence.sum(dim=1).mean() - likelihood.sum(dim=1).mean()


class MaskedTokens(nn.Module):
    """A model of masked amino acids with the smallest sizes of ESM-2 (Lin et al., 2023): 8 million weights."""

    def __init__(self, n_tokens: int, length: int, width: int = 320, n_layers: int = 6, n_heads: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens + 1, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, n_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the tokens that are masked, 15 % of them."""
        is_masked = torch.rand(tokens.shape) < 0.15
        x = self.layers(self.embedding(tokens.masked_fill(is_masked, self.head.out_features)) + self.position)
        return functional.cross_entropy(self.head(x[is_masked]), tokens[is_masked])
