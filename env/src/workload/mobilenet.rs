//! Nets of depthwise separable convolutions, all of `tch::vision`: MobileNetV2, and EfficientNet, which is made of the
//! same inverted residuals.

use serde::{Deserialize, Serialize};
use tch::vision::{efficientnet, mobilenet};

use super::pictures::{Architecture, Design, Fixed, PictureConfig};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MobilenetArch {
    /// `tch::vision`'s MobileNetV2.
    #[serde(rename = "mobilenet-v2")]
    MobilenetV2,
    /// `tch::vision`'s EfficientNet-B0.
    #[serde(rename = "efficientnet-b0")]
    EfficientnetB0,
    /// `tch::vision`'s EfficientNet-B1.
    #[serde(rename = "efficientnet-b1")]
    EfficientnetB1,
    /// `tch::vision`'s EfficientNet-B2.
    #[serde(rename = "efficientnet-b2")]
    EfficientnetB2,
    /// `tch::vision`'s EfficientNet-B3.
    #[serde(rename = "efficientnet-b3")]
    EfficientnetB3,
    /// `tch::vision`'s EfficientNet-B4.
    #[serde(rename = "efficientnet-b4")]
    EfficientnetB4,
}

/// The size of a `mobilenet` workload and how it is trained.
pub type MobilenetConfig = PictureConfig<MobilenetArch>;

impl Architecture for MobilenetArch {
    fn design(self) -> Design {
        match self {
            MobilenetArch::MobilenetV2 => {
                Fixed::design(|at, classes| Box::new(mobilenet::v2(at, classes)), 0.30, 224, 1)
            }
            MobilenetArch::EfficientnetB0 => {
                Fixed::design(|at, classes| Box::new(efficientnet::b0(at, classes)), 0.39, 224, 1)
            }
            MobilenetArch::EfficientnetB1 => {
                Fixed::design(|at, classes| Box::new(efficientnet::b1(at, classes)), 0.69, 240, 1)
            }
            MobilenetArch::EfficientnetB2 => {
                Fixed::design(|at, classes| Box::new(efficientnet::b2(at, classes)), 1.09, 288, 1)
            }
            MobilenetArch::EfficientnetB3 => {
                Fixed::design(|at, classes| Box::new(efficientnet::b3(at, classes)), 1.83, 300, 1)
            }
            MobilenetArch::EfficientnetB4 => {
                Fixed::design(|at, classes| Box::new(efficientnet::b4(at, classes)), 4.39, 380, 1)
            }
        }
    }
}
