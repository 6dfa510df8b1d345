//! What dropped versions anchor: what has to be held alive so that they can be rebuilt.

use super::{Ancestry, Custody, Hold, MakerId, Version, VersionId};

impl<R> Ancestry<R> {
    /// Whether there is anything to hold or to let go of since the last call of [`Ancestry::take_custody`].
    pub(crate) fn has_custody(&self) -> bool {
        !self.custody.is_empty()
    }

    /// What to hold and to let go of since the last call, in order.
    pub(crate) fn take_custody(&mut self) -> Vec<Custody> {
        std::mem::take(&mut self.custody)
    }

    /// Whether anchors are to go no further than to what stands: a drop costs no more then where much was made before it, but the
    /// program is to be asked what it lets go of. Returns what is held so, and is to be no more.
    pub(crate) fn hold_near(&mut self, near: bool) -> Vec<VersionId> {
        if std::mem::replace(&mut self.holds_near, near) == near || near {
            return Vec::new();
        }
        let is_near = |version: &Option<Version>| version.as_ref().is_some_and(|version| version.hold == Hold::Near);
        let versions = self.versions.iter().enumerate().filter(|(_, version)| is_near(version));
        versions.map(|(index, _)| VersionId(index as u32)).collect()
    }

    /// Anchors what a version is made from that is held and can be made again. Whether it is such a one. It is held until
    /// [`Ancestry::let_go`] says how that went.
    pub(crate) fn anchor_above(&mut self, version: VersionId) -> bool {
        let is_near = self.version(version).hold == Hold::Near && self.is_rebuildable(version);
        if is_near && let Some(maker) = self.version(version).maker {
            let mut above = Vec::new();
            self.anchor_through(maker, &mut above);
            self.anchor(above);
        }
        is_near
    }

    /// What a version is made from is anchored, so that it need not be held; or something of that had died, and it is held as before.
    pub(crate) fn let_go(&mut self, version: VersionId, is_anchored: bool) {
        let held = self.version_mut(version);
        let (entry, maker) = (held.entry, held.maker);
        if is_anchored {
            held.hold = Hold::No;
            self.custody.push(Custody::Unhold(entry));
        } else if let Some(maker) = maker {
            self.release_above(maker);
        }
    }

    /// Anchors every version in `stack`, once more where it is anchored.
    pub(super) fn anchor(&mut self, mut stack: Vec<VersionId>) {
        while let Some(top) = stack.pop() {
            let (rebuildable, near) = (self.is_rebuildable(top), self.holds_near);
            let anchored = self.version_mut(top);
            anchored.anchors += 1;
            if anchored.anchors > 1 {
                continue;
            }
            let serves = near && anchored.is_current && !anchored.is_dropped && !anchored.is_gradient;
            match anchored.maker {
                Some(maker) if rebuildable && !serves => self.anchor_through(maker, &mut stack),
                _ => {
                    assert!(anchored.is_current, "a version that is gone anchors nothing");
                    anchored.hold = if rebuildable { Hold::Near } else { Hold::Root };
                    let entry = anchored.entry;
                    self.custody.push(Custody::Hold(entry));
                }
            }
        }
    }

    /// One more of a maker's outputs is anchored through it; what is to be anchored for that goes onto `stack`.
    fn anchor_through(&mut self, maker: MakerId, stack: &mut Vec<VersionId>) {
        let known = self.makers[maker.0 as usize].as_mut().expect("kept while it has outputs");
        known.anchors += 1;
        if known.anchors == 1 {
            stack.extend(self.inputs(maker).iter().flatten());
        }
    }

    pub(super) fn release(&mut self, version: VersionId) {
        self.release_all(vec![version]);
    }

    /// One fewer of a maker's outputs is anchored through it.
    fn release_above(&mut self, maker: MakerId) {
        let mut stack = Vec::new();
        self.release_through(maker, &mut stack);
        self.release_all(stack);
    }

    /// The same; what is anchored no more for that goes onto `stack`.
    fn release_through(&mut self, maker: MakerId, stack: &mut Vec<VersionId>) {
        let known = self.makers[maker.0 as usize].as_mut().expect("kept while it has outputs");
        known.anchors -= 1;
        if known.anchors == 0 {
            stack.extend(self.inputs(maker).iter().flatten());
        }
    }

    fn release_all(&mut self, mut stack: Vec<VersionId>) {
        while let Some(top) = stack.pop() {
            let released = self.version_mut(top);
            released.anchors -= 1;
            if released.anchors > 0 {
                continue;
            }
            if std::mem::replace(&mut released.hold, Hold::No) != Hold::No {
                let entry = released.entry;
                self.custody.push(Custody::Unhold(entry));
            } else if let Some(maker) = released.maker {
                self.release_through(maker, &mut stack);
            }
        }
    }

    /// A root that is held is about to go. Where all that was made from it for dropped storages stands in storages of its own, at
    /// one remove or more, that may be held in its stead, as a lineage has it: a version that cannot be rebuilt any more serves for
    /// as long as its storage holds it. These are returned, each with what made it.
    pub(crate) fn heirs(&self, root: VersionId) -> Option<Vec<(MakerId, VersionId)>> {
        if !self.is_held(root) || self.version(root).is_wanted() {
            return None;
        }
        let (mut heirs, mut gone) = (Vec::new(), vec![root]);
        let mut seen = 0;
        while let Some(&before) = gone.get(seen) {
            seen += 1;
            for index in 0..self.makers.len() as u32 {
                let id = MakerId(index);
                let Some(maker) = &self.makers[index as usize] else { continue };
                if maker.anchors == 0 || !self.inputs(id).contains(&Some(before)) {
                    continue;
                }
                for &output in self.outputs(id) {
                    let made = self.version(output);
                    if made.anchors == 0 || made.hold != Hold::No {
                        continue;
                    }
                    if made.is_dropped {
                        return None;
                    }
                    if !made.is_current {
                        gone.extend(Some(output).filter(|output| !gone.contains(output)));
                    } else if !heirs.contains(&(id, output)) {
                        heirs.push((id, output));
                    }
                }
            }
        }
        Some(heirs)
    }

    /// Lets go of a root for its [`Ancestry::heirs`].
    pub(crate) fn relinquish(&mut self, heirs: Vec<(MakerId, VersionId)>) {
        for (maker, heir) in heirs {
            // It was wanted only for what another one serves for.
            if !self.is_anchored(heir) {
                continue;
            }
            let held = self.version_mut(heir);
            held.hold = Hold::Root;
            let entry = held.entry;
            self.custody.push(Custody::Hold(entry));
            self.release_above(maker);
        }
    }
}
