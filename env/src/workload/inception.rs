//! Nets whose layers have branches side by side, all of `tch::vision`: Inception-v3, and SqueezeNet's fire modules.

use serde::{Deserialize, Serialize};
use tch::vision::{inception, squeezenet};

use super::pictures::{Architecture, Design, Fixed, PictureConfig};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InceptionArch {
    /// `tch::vision`'s Inception-v3, without its auxiliary head.
    #[serde(rename = "inception-v3")]
    InceptionV3,
    /// `tch::vision`'s SqueezeNet 1.0.
    #[serde(rename = "squeezenet-1.0")]
    Squeezenet1_0,
    /// `tch::vision`'s SqueezeNet 1.1.
    #[serde(rename = "squeezenet-1.1")]
    Squeezenet1_1,
}

/// The size of an `inception` workload and how it is trained.
pub type InceptionConfig = PictureConfig<InceptionArch>;

impl Architecture for InceptionArch {
    fn design(self) -> Design {
        match self {
            InceptionArch::InceptionV3 => {
                Fixed::design(|at, classes| Box::new(inception::v3(at, classes)), 5.71, 299, 75)
            }
            InceptionArch::Squeezenet1_0 => {
                Fixed::design(|at, classes| Box::new(squeezenet::v1_0(at, classes)), 0.82, 224, 32)
            }
            InceptionArch::Squeezenet1_1 => {
                Fixed::design(|at, classes| Box::new(squeezenet::v1_1(at, classes)), 0.35, 224, 32)
            }
        }
    }
}
