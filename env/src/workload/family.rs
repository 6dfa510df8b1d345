//! The model families: the one place that lists them.

use std::fmt;

use plimsoll_runtime::torch::settings::Determinism;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, TchError};

use super::training::{Loop, Member};
use super::*;

/// Something that is read for the members of one family.
pub(crate) trait ReadFamily {
    /// What reading gives.
    type Output;

    /// Reads configurations of type `C`, each of which `wrap` makes a workload's.
    fn read<C: DeserializeOwned>(self, wrap: fn(C) -> WorkloadConfig) -> Self::Output;
}

macro_rules! families {
    ($($(#[$doc:meta])* $name:literal => $family:ident($config:ident),)*) => {
        /// A model family.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Family {
            $($(#[$doc])* #[serde(rename = $name)] $family,)*
        }

        impl Family {
            /// Every family.
            pub const ALL: &[Family] = &[$(Family::$family),*];

            /// Its name in configurations, traces and policies.
            pub const fn name(self) -> &'static str {
                match self { $(Family::$family => $name),* }
            }

            /// Lets `reader` read what is written for this family.
            pub(crate) fn read<R: ReadFamily>(self, reader: R) -> R::Output {
                match self { $(Family::$family => reader.read::<$config>(WorkloadConfig::$family)),* }
            }
        }

        /// What a workload is made from.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "family")]
        pub enum WorkloadConfig {
            $($(#[$doc])* #[serde(rename = $name)] $family($config),)*
        }

        impl WorkloadConfig {
            /// The family that it belongs to.
            pub const fn family(&self) -> Family {
                match self { $(WorkloadConfig::$family(_) => Family::$family),* }
            }

            /// Samples in a batch.
            pub const fn batch(&self) -> i64 {
                match self { $(WorkloadConfig::$family(config) => config.batch),* }
            }

            /// The same workload with another batch size.
            pub fn with_batch(&self, batch: i64) -> Self {
                match self.clone() {
                    $(WorkloadConfig::$family(config) => WorkloadConfig::$family($config { batch, ..config })),*
                }
            }

            fn member(&self) -> &dyn Member {
                match self { $(WorkloadConfig::$family(config) => config),* }
            }
        }
    };
}

families! {
    /// Decoder-only transformers.
    "gpt" => Gpt(GptConfig),
    /// Encoder-only transformers.
    "bert" => Bert(BertConfig),
    /// Transformers over patches of pictures.
    "vit" => Vit(VitConfig),
    /// Recurrent nets.
    "lstm" => Lstm(LstmConfig),
    /// Residual convolution nets.
    "resnet" => Resnet(ResnetConfig),
    /// Plain convolution nets.
    "vgg" => Vgg(VggConfig),
    /// Densely connected convolution nets.
    "densenet" => Densenet(DensenetConfig),
    /// Nets of depthwise separable convolutions.
    "mobilenet" => Mobilenet(MobilenetConfig),
    /// Nets whose layers have branches side by side.
    "inception" => Inception(InceptionConfig),
    /// Segmentation nets with connections across.
    "unet" => Unet(UnetConfig),
    /// Autoencoders whose loss holds a gradient.
    "autoencoder" => Autoencoder(AutoencoderConfig),
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl WorkloadConfig {
    /// Builds the workload `name` on `device`.
    ///
    /// The same seed gives the same bits in every run on the same machine. Parameters are made by `tch`'s
    /// layers, which panic where the device has no room for them.
    pub fn build(&self, name: &str, device: Device, seed: u64) -> Result<Box<dyn Workload>, TchError> {
        self.build_as(name, device, seed, Manner::default())
    }

    /// [`WorkloadConfig::build`], run in that manner.
    pub fn build_as(
        &self,
        name: &str,
        device: Device,
        seed: u64,
        manner: Manner,
    ) -> Result<Box<dyn Workload>, TchError> {
        Ok(Box::new(Loop::new(self.member(), self.family().name(), name, device, seed, manner)?))
    }

    /// The most that its operators have kernels for on a GPU.
    pub fn determinism(&self) -> Determinism {
        match self {
            WorkloadConfig::Gpt(_) => Determinism::Required,
            // libtorch calls the backward pass of max-pooling nondeterministic, for one, and has no other.
            _ => Determinism::Preferred,
        }
    }

    /// Says which key holds a value that no workload can have.
    pub fn validate(&self) -> Result<(), Implausible> {
        self.member().validate()
    }

    /// Floating-point operations of one iteration, estimated from the structure: what tells a workload that is
    /// recorded in seconds from one that takes hours.
    pub fn flops(&self) -> f64 {
        self.member().flops()
    }
}
