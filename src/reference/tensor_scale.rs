use crate::formats::Element;
use crate::scales::ScaleType;

/// The per-tensor scale of a layer and side whose largest finite magnitude is `amax`.
pub fn tensor_scale(element: Element, amax: f32) -> f32 {
    ScaleType::F32.from_amax(amax, element.info().max).value
}
