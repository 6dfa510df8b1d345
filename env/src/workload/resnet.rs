//! Residual convolution nets: those of `tch::vision`, and a small one.

use serde::{Deserialize, Serialize};
use tch::vision::resnet;

use super::cifar;
use super::pictures::{Architecture, Design, Fixed, PictureConfig};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// The net for small pictures, of free depth and width.
    Cifar,
    /// `tch::vision`'s ResNet-18.
    Resnet18,
    /// `tch::vision`'s ResNet-34.
    Resnet34,
    /// `tch::vision`'s ResNet-50.
    Resnet50,
    /// `tch::vision`'s ResNet-101.
    Resnet101,
    /// `tch::vision`'s ResNet-152.
    Resnet152,
}

/// The size of a `resnet` workload and how it is trained.
pub type ResnetConfig = PictureConfig<Arch>;

impl Architecture for Arch {
    fn design(self) -> Design {
        match self {
            Arch::Cifar => cifar::design(),
            Arch::Resnet18 => Fixed::design(|at, classes| Box::new(resnet::resnet18(at, classes)), 1.81, 224, 1),
            Arch::Resnet34 => Fixed::design(|at, classes| Box::new(resnet::resnet34(at, classes)), 3.66, 224, 1),
            Arch::Resnet50 => Fixed::design(|at, classes| Box::new(resnet::resnet50(at, classes)), 4.09, 224, 1),
            Arch::Resnet101 => Fixed::design(|at, classes| Box::new(resnet::resnet101(at, classes)), 7.80, 224, 1),
            Arch::Resnet152 => Fixed::design(|at, classes| Box::new(resnet::resnet152(at, classes)), 11.51, 224, 1),
        }
    }
}
