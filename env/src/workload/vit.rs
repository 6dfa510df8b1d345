//! A transformer over patches of a picture, which learns the direction of stripes.
//!
//! Follows "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (Dosovitskiy et al. 2021),
//! section 3.1, "Vision Transformer (ViT)".

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, Linear, Path, VarStore};
use tch::{Device, TchError, Tensor};

use super::gratings::Gratings;
use super::layers::{LayerNorm, apply, cross_entropy};
use super::training::{Batch, Member, Task, Training};
use super::transformer::{Block, BlockShape, NormAt, WEIGHTS, iteration_flops, linear};
use super::{Implausible, require, require_heads, require_learning_rate, require_share, require_sizes};

/// The size of a `vit` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
    /// Transformer blocks.
    pub layers: i64,
    /// Features of a patch between blocks.
    pub width: i64,
    /// Attention heads; they share the width.
    pub heads: i64,
    /// Pixels along a side of a patch; patches tile the picture.
    pub patch: i64,
    /// Pixels along a side of a picture.
    pub image_size: i64,
    /// Classes to tell apart.
    pub classes: i64,
    /// Pictures in a batch.
    pub batch: i64,
    /// Share of features that are dropped in training.
    pub dropout: f64,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
}

impl VitConfig {
    /// Patches of a picture, and the token that the class is read from.
    fn tokens(&self) -> i64 {
        (self.image_size / self.patch).pow(2) + 1
    }
}

impl Member for VitConfig {
    fn validate(&self) -> Result<(), Implausible> {
        let VitConfig { layers, width, heads, patch, image_size, classes, batch, dropout, learning_rate } = *self;
        require_sizes(&[
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("patch", patch),
            ("image_size", image_size),
            ("classes", classes),
            ("batch", batch),
        ])?;
        require_heads(heads, width)?;
        require("patch", image_size % patch == 0, format!("must divide the image_size {image_size}, is {patch}"))?;
        require_share("dropout", dropout)?;
        require_learning_rate(learning_rate)
    }

    fn flops(&self) -> f64 {
        iteration_flops(self.layers, self.width, self.tokens(), self.batch)
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        let gratings = Gratings::new(self.classes, self.image_size);
        Ok(Box::new(Vit { batch: self.batch, gratings, model: Model::new(&variables.root(), self) }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::AdamW::default(), self.learning_rate)
    }
}

/// The class of every picture.
struct Vit {
    batch: i64,
    gratings: Gratings,
    model: Model,
}

impl Task for Vit {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        self.gratings.batch(draw, self.batch, device)
    }

    fn loss(&self, Batch { inputs, targets, .. }: Batch) -> Result<Tensor, TchError> {
        cross_entropy(&self.model.forward(&inputs)?, &targets)
    }
}

/// Patches, blocks, and the layer that classifies.
struct Model {
    patch: i64,
    project: Linear,
    class: Tensor,
    positions: Tensor,
    dropout: f64,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    fn new(at: &Path, config: &VitConfig) -> Self {
        let VitConfig { layers, width, heads, patch, classes, dropout, .. } = *config;
        let shape = BlockShape { width, heads, dropout, causal: false, norm_at: NormAt::Start };
        Model {
            patch,
            project: nn::linear(at / "project", 3 * patch * patch, width, Default::default()),
            class: at.var("class", &[1, 1, width], WEIGHTS),
            positions: at.var("positions", &[config.tokens(), width], WEIGHTS),
            dropout,
            blocks: Block::stack(at / "block", layers, shape),
            norm: LayerNorm::new(at / "norm", width),
            head: linear(at / "head", width, classes),
        }
    }

    /// Maps pictures `[batch, 3, size, size]` to logits `[batch, classes]`.
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let (batch, channels, size, _) = pictures.size4()?;
        let across = size / self.patch;
        // [batch, channels, down, patch, across, patch] to [batch, down, across, channels, patch, patch]
        let tiled = pictures.f_view([batch, channels, across, self.patch, across, self.patch])?;
        let patches = tiled.f_permute([0, 2, 4, 1, 3, 5])?.f_reshape([batch, across * across, -1])?;
        let class = self.class.f_expand([batch, 1, -1], false)?;
        let tokens = Tensor::f_cat(&[class, apply(&self.project, &patches)?], 1)?;
        let mut hidden = tokens.f_add(&self.positions)?.f_dropout(self.dropout, true)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden)?;
        }
        apply(&self.head, &self.norm.forward(&hidden.f_select(1, 0)?)?)
    }
}
