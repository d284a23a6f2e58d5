//! The drift picture: memory along the bottom, damage up the side, a labelled point a pair. SVG or PNG. And what other
//! pictures draw with.
//!
//! Everything is laid out here in picture units, so that both kinds of file look the same and labels know what they must
//! keep clear of; plotters draws lines and discs. The letters of a PNG are set here, to a fraction of a pixel.

use std::path::Path;

use ab_glyph::{Font, FontRef, Glyph, PxScale, ScaleFont, point};
use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle};

use super::labels::{self, Placed, Point, Rect};
use super::never_packed;
use crate::drift::DriftRow;
use crate::error::{Error, Result};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 600.0;
/// The plot inside the picture.
pub(super) const PLOT: Rect = Rect {
    left: 76.0,
    top: 110.0,
    right: 930.0,
    bottom: 520.0,
};
/// What a PNG has of pixels for one unit: sharp on dense screens too.
const PNG_SCALE: f64 = 2.0;
const RADIUS: f64 = 5.0;
pub(super) const LABEL_SIZE: f64 = 14.0;
/// Paper on both sides of a label's text.
const LABEL_PADDING: f64 = 2.0;
pub(super) const TICK_SIZE: f64 = 13.0;
pub(super) const NOTE_SIZE: f64 = 12.5;
/// A viewer's sans-serif may be wider than ours; the boxes of labels leave room for it.
const WIDER: f64 = 1.15;
/// Height of the band below the scale that holds drifts of exactly 0.
const ZERO_BAND: f64 = 44.0;

pub(super) const INK: RGBColor = RGBColor(32, 36, 44);
pub(super) const FAINT: RGBColor = RGBColor(96, 103, 115);
pub(super) const GRID: RGBColor = RGBColor(222, 226, 232);
pub(super) const FINE_GRID: RGBColor = RGBColor(241, 243, 246);
pub(super) const LEADER: RGBColor = RGBColor(150, 156, 168);
pub(super) const POINT: RGBColor = RGBColor(0, 94, 162);
const PAPER: RGBColor = RGBColor(255, 255, 255);

/// The kind of a picture, by the end of its file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Picture {
    /// Lines and letters as text, shown by every browser; letters in the viewer's own sans-serif.
    Svg,
    /// Pixels.
    Png,
}

impl Picture {
    /// `.svg` or `.png`, in either case of letters; anything else is a usage error.
    pub fn of(path: &Path) -> Result<Picture> {
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        match extension.as_ref().and_then(|extension| extension.to_str()) {
            Some("svg") => Ok(Picture::Svg),
            Some("png") => Ok(Picture::Png),
            _ => Err(Error::Usage {
                asked: format!("picture file `{}`", path.display()),
                reason: "the end of its name is not that of a kind of picture that can be drawn".to_owned(),
                advice: "end it with .svg or .png".to_owned(),
            }),
        }
    }
}

/// Draws the rows. Values that are not finite are an error, drifts of 0 have a band of their own at the bottom.
pub fn drift_plot(rows: &[DriftRow], picture: Picture) -> Result<Vec<u8>> {
    Spots::of(rows).drawn(picture)
}

/// One pair of a drift picture.
pub(super) struct Spot {
    pub pair: String,
    pub bits: f64,
    pub drift: f64,
    /// What of it was never packed: its figures are not those of the format.
    pub unpacked: Vec<&'static str>,
}

/// What a drift picture shows.
pub(super) struct Spots {
    pub title: String,
    pub settings: String,
    pub device: String,
    pub spots: Vec<Spot>,
}

impl Spots {
    fn of(rows: &[DriftRow]) -> Spots {
        let spot = |row: &DriftRow| Spot {
            pair: row.pair.clone(),
            bits: row.bits_per_number,
            drift: row.logit_drift,
            unpacked: never_packed(row).iter().map(|unpacked| unpacked.side).collect(),
        };
        Spots {
            title: "Logit drift against memory".to_owned(),
            settings: settings(rows),
            device: rows
                .first()
                .map_or(String::new(), |row| format!("{}: {}", row.device, row.adapter)),
            spots: rows.iter().map(spot).collect(),
        }
    }

    /// Draws them.
    pub fn drawn(&self, picture: Picture) -> Result<Vec<u8>> {
        drawn(&Layout::of(self, &letters()?)?, picture)
    }
}

/// What is laid out and can be drawn, on either kind of picture.
pub(super) trait Drawing {
    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<()>;
}

/// A picture as the bytes of its file.
pub(super) fn drawn(drawing: &impl Drawing, picture: Picture) -> Result<Vec<u8>> {
    let font = letters()?;
    match picture {
        Picture::Svg => {
            let mut text = String::new();
            {
                let root =
                    SVGBackend::with_string(&mut text, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
                drawing.draw(&Canvas {
                    root,
                    font,
                    scale: 1.0,
                    kind: Picture::Svg,
                })?;
            }
            Ok(text.into_bytes())
        }
        Picture::Png => {
            let (width, height) = ((WIDTH * PNG_SCALE) as u32, (HEIGHT * PNG_SCALE) as u32);
            let mut pixels = vec![255; width as usize * height as usize * 3];
            {
                let root = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
                drawing.draw(&Canvas {
                    root,
                    font,
                    scale: PNG_SCALE,
                    kind: Picture::Png,
                })?;
            }
            encode_png(&pixels, width, height).map_err(self::drawing)
        }
    }
}

fn encode_png(pixels: &[u8], width: u32, height: u32) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

fn drawing(error: impl std::fmt::Display) -> Error {
    Error::Usage {
        asked: "the picture".to_owned(),
        reason: format!("it could not be drawn: {error}"),
        advice: "write --json or --csv and draw them elsewhere".to_owned(),
    }
}

/// How a point looks. The order is that of drawing: what comes later is never hidden by what comes before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Look {
    /// A cross: K or V was never packed, so that the figures are not those of the format.
    Unpacked,
    /// An open ring: some other pair that was packed is better in one and worse in none.
    Beaten,
    /// A disc: no other pair is.
    Best,
}

impl Look {
    fn of(row: &Spot, rows: &[Spot]) -> Look {
        let beats = |other: &Spot| {
            other.unpacked.is_empty()
                && other.bits <= row.bits
                && other.drift <= row.drift
                && (other.bits < row.bits || other.drift < row.drift)
        };
        if !row.unpacked.is_empty() {
            Look::Unpacked
        } else if rows.iter().any(beats) {
            Look::Beaten
        } else {
            Look::Best
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Look::Unpacked => "K or V never packed",
            Look::Beaten => "another is better in one, worse in none",
            Look::Best => "beaten by none here",
        }
    }
}

/// Where everything goes, in picture units.
struct Layout {
    title: String,
    settings: String,
    device: String,
    x_ticks: Vec<(f64, String, String)>,
    y_ticks: Vec<(f64, String)>,
    fine: Vec<f64>,
    zero: Option<f64>,
    points: Vec<Point>,
    looks: Vec<Look>,
    names: Vec<String>,
    placed: Vec<Option<Placed>>,
}

impl Layout {
    fn of(picture: &Spots, font: &FontRef) -> Result<Layout> {
        let rows = &picture.spots[..];
        for row in rows {
            let values = [row.bits, row.drift];
            if values.iter().any(|value| !value.is_finite()) {
                return Err(Error::NonFinite {
                    what: format!("the figures of {}", row.pair),
                    nan: values.iter().filter(|value| value.is_nan()).count() as u64,
                    infinite: values.iter().filter(|value| value.is_infinite()).count() as u64,
                });
            }
        }
        let positive = |value: f64| (value > 0.0).then_some(value);
        let x = Scale::over(rows.iter().filter_map(|row| positive(row.bits)), 1.08, 2.0);
        let y = Scale::over(rows.iter().filter_map(|row| positive(row.drift)), 1.5, 10.0);
        let has_zero = rows.iter().any(|row| row.drift <= 0.0);
        let bottom = PLOT.bottom - if has_zero { ZERO_BAND } else { 0.0 };
        let zero = has_zero.then_some(PLOT.bottom - ZERO_BAND / 2.0);
        let x_of = |bits: f64| x.place(bits, PLOT.left, PLOT.right);
        let y_of = |drift: f64| match (positive(drift), zero) {
            (None, Some(zero)) => zero,
            _ => y.place(drift, bottom, PLOT.top),
        };
        let points: Vec<Point> = rows.iter().map(|row| (x_of(row.bits), y_of(row.drift))).collect();
        let looks = rows.iter().map(|row| Look::of(row, rows)).collect();
        let names: Vec<String> = rows
            .iter()
            .map(|row| fitted(&label(row), LABEL_SIZE, 260.0, font))
            .collect();
        let sizes: Vec<Point> = names
            .iter()
            .map(|name| {
                (
                    width(name, LABEL_SIZE, font) * WIDER + 2.0 * LABEL_PADDING,
                    LABEL_SIZE * 1.3,
                )
            })
            .collect();
        let inner = Rect {
            left: PLOT.left + 2.0,
            top: PLOT.top + 2.0,
            right: PLOT.right - 2.0,
            bottom: PLOT.bottom - 2.0,
        };
        let placed = labels::place(&points, &sizes, RADIUS, inner);
        let left_out = placed.iter().filter(|placed| placed.is_none()).count();
        let (y_ticks, fine) = y.decades(y_of);
        Ok(Layout {
            title: picture.title.clone(),
            settings: match left_out {
                0 => picture.settings.clone(),
                _ => format!(
                    "{left_out} labels left out for want of room \u{b7} {}",
                    picture.settings
                ),
            },
            device: picture.device.clone(),
            x_ticks: x_ticks(&x, x_of),
            y_ticks,
            fine,
            zero,
            points,
            looks,
            names,
            placed,
        })
    }
}

/// The pair, and what of it was never packed: its figures are not those of the format.
fn label(row: &Spot) -> String {
    match row.unpacked.as_slice() {
        [] => row.pair.clone(),
        [one] => format!("{}, {one} unpacked", row.pair),
        _ => format!("{}, unpacked", row.pair),
    }
}

fn settings(rows: &[DriftRow]) -> String {
    let Some(row) = rows.first() else {
        return "no pairs".to_owned();
    };
    let mut parts = vec![format!("convention {}", row.convention), row.mode.clone()];
    if row.window != 0 {
        parts.push(format!("window {}", row.window));
    }
    if row.outlier != 1.0 {
        parts.push(format!("outlier \u{d7}{}", super::factor(row.outlier)));
    }
    parts.join(" \u{b7} ")
}

/// A logarithmic scale.
pub(super) struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    /// Over the values, with `margin` times more at both ends and at least a span of `least`.
    pub(super) fn over(values: impl Iterator<Item = f64>, margin: f64, least: f64) -> Scale {
        let (low, high) = values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        if high == 0.0 {
            return Scale {
                low: 1.0,
                high: least,
            };
        }
        // Logarithms: the middle of 1e-300 and 1e300 is not lost.
        let (low, high) = (low.ln() - margin.ln(), high.ln() + margin.ln());
        let widen = ((least.ln() - (high - low)) / 2.0).max(0.0);
        Scale {
            low: (low - widen).exp(),
            high: (high + widen).exp(),
        }
    }

    pub(super) fn place(&self, value: f64, from: f64, to: f64) -> f64 {
        let share = (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln());
        from + share.clamp(0.0, 1.0) * (to - from)
    }

    /// Labelled lines and fine lines.
    pub(super) fn decades(&self, place: impl Fn(f64) -> f64) -> (Vec<(f64, String)>, Vec<f64>) {
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let inside = |value: &f64| *value >= self.low && *value <= self.high;
        let whole = (first..=last)
            .filter(|&power| inside(&power_of_ten(power)))
            .count();
        let factors: &[f64] = if whole <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = (whole as i32 / 9).max(1);
        let mut labelled = Vec::new();
        let mut fine = Vec::new();
        for power in first..=last {
            for factor in 1..10 {
                let value = f64::from(factor) * power_of_ten(power);
                if !inside(&value) {
                    continue;
                }
                if factors.contains(&f64::from(factor)) && power.rem_euclid(every) == 0 {
                    labelled.push((place(value), tick(value)));
                } else if every == 1 {
                    fine.push(place(value));
                }
            }
        }
        (labelled, fine)
    }
}

fn power_of_ten(power: i32) -> f64 {
    // Parsed, not multiplied: the tick for 0.0001 is to be exactly that.
    format!("1e{power}").parse().unwrap_or(f64::NAN)
}

fn tick(value: f64) -> String {
    if (1e-5..1e5).contains(&value) {
        format!("{value}")
    } else {
        format!("{value:e}")
    }
}

/// Bits with their share of FP16 below; ticks that would touch their left neighbour are left out.
fn x_ticks(scale: &Scale, place: impl Fn(f64) -> f64) -> Vec<(f64, String, String)> {
    let candidates = [
        1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 32.0,
    ];
    // The powers of two first: they are the ones to be there.
    let powers = |bits: &&f64| bits.log2().fract() == 0.0;
    let (first, rest): (Vec<&f64>, Vec<&f64>) = candidates.iter().partition(powers);
    let mut ticks: Vec<(f64, f64)> = Vec::new();
    for &bits in first.into_iter().chain(rest) {
        let at = place(bits);
        if bits >= scale.low
            && bits <= scale.high
            && ticks.iter().all(|&(other, _)| (other - at).abs() > 50.0)
        {
            ticks.push((at, bits));
        }
    }
    ticks.sort_by(|a, b| a.0.total_cmp(&b.0));
    ticks
        .into_iter()
        .map(|(at, bits)| {
            let percent = format!("{:.1}", bits / 16.0 * 100.0);
            (
                at,
                format!("{bits}"),
                format!("{}%", percent.trim_end_matches(".0")),
            )
        })
        .collect()
}

fn letters() -> Result<FontRef<'static>> {
    FontRef::try_from_slice(notosans::REGULAR_TTF).map_err(drawing)
}

/// The glyphs of a text whose letters stand on the origin, and its width.
fn set(text: &str, size: f64, font: &FontRef) -> (Vec<Glyph>, f64) {
    let em = font.units_per_em().unwrap_or(1000.0);
    // The font's own measure is the height from its lowest to its highest letter; ours is the em.
    let scale = PxScale::from(size as f32 * font.height_unscaled() / em);
    let scaled = font.as_scaled(scale);
    let mut glyphs: Vec<Glyph> = Vec::new();
    let mut x = 0.0;
    for letter in text.chars() {
        let id = font.glyph_id(letter);
        x += glyphs.last().map_or(0.0, |before| scaled.kern(before.id, id));
        glyphs.push(id.with_scale_and_position(scale, point(x, 0.0)));
        x += scaled.h_advance(id);
    }
    (glyphs, f64::from(x))
}

/// The width of a text in our letters.
fn width(text: &str, size: f64, font: &FontRef) -> f64 {
    set(text, size, font).1
}

/// The text, shortened until it is no wider than `most`.
fn fitted(text: &str, size: f64, most: f64, font: &FontRef) -> String {
    // Control characters are neither shown nor legal in an SVG.
    let clean: String = text.chars().filter(|letter| !letter.is_control()).collect();
    if width(&clean, size, font) * WIDER <= most {
        return clean;
    }
    let mut letters: Vec<char> = clean.chars().collect();
    loop {
        letters.pop();
        let shorter: String = letters.iter().collect::<String>().trim_end().to_owned() + "\u{2026}";
        if letters.is_empty() || width(&shorter, size, font) * WIDER <= most {
            return shorter;
        }
    }
}

pub(super) struct Canvas<B: DrawingBackend> {
    root: DrawingArea<B, Shift>,
    font: FontRef<'static>,
    scale: f64,
    kind: Picture,
}

impl Drawing for Layout {
    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<()> {
        canvas.draw(self)
    }
}

impl<B: DrawingBackend> Canvas<B> {
    /// Paper, and the lines above a plot: a title and two notes.
    pub(super) fn head(&self, title: &str, notes: [&str; 2]) -> Result<()> {
        self.root.fill(&PAPER).map_err(drawing)?;
        self.text(title, (PLOT.left, 32.0), 20.0, INK, HPos::Left)?;
        for (line, y) in notes.into_iter().zip([52.0, 70.0]) {
            let line = fitted(line, NOTE_SIZE, PLOT.right - PLOT.left, &self.font);
            self.text(&line, (PLOT.left, y), NOTE_SIZE, FAINT, HPos::Left)?;
        }
        Ok(())
    }

    /// A filled rectangle.
    pub(super) fn bar(&self, rect: Rect, color: RGBColor) -> Result<()> {
        let style = ShapeStyle {
            color: color.into(),
            filled: true,
            stroke_width: 0,
        };
        let corners = [
            self.pixels((rect.left, rect.top)),
            self.pixels((rect.right, rect.bottom)),
        ];
        self.root.draw(&Rectangle::new(corners, style)).map_err(drawing)
    }

    /// A filled disc.
    pub(super) fn disc(&self, at: Point, radius: f64, color: RGBColor) -> Result<()> {
        let style = ShapeStyle {
            color: color.into(),
            filled: true,
            stroke_width: 0,
        };
        let radius = (radius * self.scale).round() as i32;
        self.root
            .draw(&Circle::new(self.pixels(at), radius, style))
            .map_err(drawing)
    }

    pub(super) fn present(&self) -> Result<()> {
        self.root.present().map_err(drawing)
    }

    fn draw(&self, layout: &Layout) -> Result<()> {
        self.head(&layout.title, [&layout.settings, &layout.device])?;
        for &y in &layout.fine {
            self.line(&[(PLOT.left, y), (PLOT.right, y)], 1.0, FINE_GRID)?;
        }
        for (y, _) in &layout.y_ticks {
            self.line(&[(PLOT.left, *y), (PLOT.right, *y)], 1.0, GRID)?;
        }
        for (x, _, _) in &layout.x_ticks {
            self.line(&[(*x, PLOT.top), (*x, PLOT.bottom)], 1.0, GRID)?;
        }
        if layout.zero.is_some() {
            let y = PLOT.bottom - ZERO_BAND;
            self.line(&[(PLOT.left, y), (PLOT.right, y)], 1.0, LEADER)?;
        }
        let corners = [
            (PLOT.left, PLOT.top),
            (PLOT.right, PLOT.top),
            (PLOT.right, PLOT.bottom),
            (PLOT.left, PLOT.bottom),
            (PLOT.left, PLOT.top),
        ];
        self.line(&corners, 1.0, LEADER)?;

        self.text(
            "logit drift, log scale",
            (PLOT.left, PLOT.top - 10.0),
            TICK_SIZE,
            INK,
            HPos::Left,
        )?;
        for (y, label) in &layout.y_ticks {
            self.text(
                label,
                (PLOT.left - 8.0, y + TICK_SIZE * 0.36),
                TICK_SIZE,
                FAINT,
                HPos::Right,
            )?;
        }
        if let Some(zero) = layout.zero {
            self.text(
                "0",
                (PLOT.left - 8.0, zero + TICK_SIZE * 0.36),
                TICK_SIZE,
                FAINT,
                HPos::Right,
            )?;
        }
        for (x, bits, share) in &layout.x_ticks {
            self.text(bits, (*x, PLOT.bottom + 19.0), TICK_SIZE, INK, HPos::Center)?;
            self.text(share, (*x, PLOT.bottom + 35.0), NOTE_SIZE, FAINT, HPos::Center)?;
        }
        let axis = "bits per number with its scales, and share of FP16's memory, log scale";
        self.text(axis, (PLOT.left, PLOT.bottom + 60.0), TICK_SIZE, INK, HPos::Left)?;
        self.legend(layout)?;

        for placed in layout.placed.iter().flatten() {
            if let Some((from, to)) = placed.leader {
                self.line(&[from, to], 1.0, LEADER)?;
            }
        }
        let mut points: Vec<_> = layout.looks.iter().zip(&layout.points).collect();
        points.sort_by_key(|&(look, _)| *look);
        for (&look, &point) in points {
            self.point(point, look)?;
        }
        for ((placed, name), &point) in layout.placed.iter().zip(&layout.names).zip(&layout.points) {
            if let Some(placed) = placed {
                self.label(placed, name, point)?;
            }
        }
        self.present()
    }

    /// What the looks mean, of those that there are.
    fn legend(&self, layout: &Layout) -> Result<()> {
        let y = PLOT.top - 15.0;
        let mut right = PLOT.right;
        for look in [Look::Unpacked, Look::Beaten, Look::Best] {
            if !layout.looks.contains(&look) {
                continue;
            }
            let left = right - width(look.meaning(), NOTE_SIZE, &self.font) * WIDER;
            let at = (left, y + NOTE_SIZE * 0.36);
            self.text(look.meaning(), at, NOTE_SIZE, FAINT, HPos::Left)?;
            self.point((left - 11.0, y), look)?;
            right = left - 36.0;
        }
        Ok(())
    }

    fn pixels(&self, (x, y): Point) -> (i32, i32) {
        ((x * self.scale).round() as i32, (y * self.scale).round() as i32)
    }

    pub(super) fn line(&self, points: &[Point], thickness: f64, color: RGBColor) -> Result<()> {
        let style = ShapeStyle {
            color: color.into(),
            filled: false,
            stroke_width: (thickness * self.scale) as u32,
        };
        let points: Vec<_> = points.iter().map(|&point| self.pixels(point)).collect();
        self.root.draw(&PathElement::new(points, style)).map_err(drawing)
    }

    fn point(&self, at: Point, look: Look) -> Result<()> {
        let disc = |radius: f64, color: RGBColor| self.disc(at, radius, color);
        disc(RADIUS + 1.0, PAPER)?;
        if look == Look::Unpacked {
            let (x, y) = at;
            let arm = RADIUS - 1.0;
            return [arm, -arm]
                .into_iter()
                .try_for_each(|up| self.line(&[(x - arm, y + up), (x + arm, y - up)], 2.0, FAINT));
        }
        disc(RADIUS, POINT)?;
        if look == Look::Beaten {
            disc(RADIUS - 2.0, PAPER)?;
        }
        Ok(())
    }

    /// The name at the side of its box that its point is on.
    fn label(&self, placed: &Placed, name: &str, point: Point) -> Result<()> {
        let rect = placed.rect;
        self.bar(rect, PAPER)?;
        let (x, anchor) = match point.0 {
            x if x < rect.left => (rect.left + LABEL_PADDING, HPos::Left),
            x if x > rect.right => (rect.right - LABEL_PADDING, HPos::Right),
            _ => (rect.centre().0, HPos::Center),
        };
        self.text(
            name,
            (x, rect.centre().1 + LABEL_SIZE * 0.36),
            LABEL_SIZE,
            INK,
            anchor,
        )
    }

    /// A text whose letters stand on `at`.
    pub(super) fn text(&self, text: &str, at: Point, size: f64, color: RGBColor, anchor: HPos) -> Result<()> {
        match self.kind {
            Picture::Svg => {
                // What the SVG backend makes of a size, and how far below its place the letters then stand.
                let style = TextStyle::from(("sans-serif", size * 1.24).into_font()).color(&color);
                let place = self.pixels((at.0, at.1 - 0.76 * size));
                let text = Text::new(text.to_owned(), place, style.pos(Pos::new(anchor, VPos::Top)));
                self.root.draw(&text).map_err(drawing)
            }
            Picture::Png => {
                let (glyphs, width) = set(text, size * self.scale, &self.font);
                let left = match anchor {
                    HPos::Left => 0.0,
                    HPos::Center => width / 2.0,
                    HPos::Right => width,
                };
                let (x, y) = (at.0 * self.scale - left, (at.1 * self.scale).round());
                glyphs
                    .into_iter()
                    .try_for_each(|glyph| self.glyph(glyph, (x, y), color))
            }
        }
    }

    fn glyph(&self, mut glyph: Glyph, (x, y): Point, color: RGBColor) -> Result<()> {
        glyph.position += point(x as f32, y as f32);
        // A space has no outline.
        let Some(outline) = self.font.outline_glyph(glyph) else {
            return Ok(());
        };
        let corner = outline.px_bounds().min;
        let mut outcome = Ok(());
        outline.draw(|column, row, share| {
            let pixel = (corner.x as i32 + column as i32, corner.y as i32 + row as i32);
            if share > 0.0 && outcome.is_ok() {
                let color = color.mix(f64::from(share.min(1.0)));
                outcome = self.root.draw_pixel(pixel, &color).map_err(drawing);
            }
        });
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples::{published, row};

    fn layout_of(rows: &[DriftRow]) -> Layout {
        let layout = Layout::of(&Spots::of(rows), &letters().unwrap()).unwrap();
        let faults = labels::faults(&layout.placed, &layout.points, RADIUS, PLOT);
        assert!(faults.is_empty(), "{faults:?}");
        assert!(layout.placed.iter().all(Option::is_some));
        for &(x, y) in &layout.points {
            assert!(x > PLOT.left && x < PLOT.right && y > PLOT.top && y < PLOT.bottom);
        }
        layout
    }

    #[test]
    fn the_table_has_a_readable_label_beside_each_point() {
        let layout = layout_of(&published());
        assert!(
            layout
                .placed
                .iter()
                .flatten()
                .all(|placed| placed.leader.is_none())
        );
        let labels: Vec<_> = layout.y_ticks.iter().map(|(_, label)| label.as_str()).collect();
        assert_eq!(labels, ["0.0001", "0.001", "0.01", "0.1"]);
        assert!(
            layout
                .x_ticks
                .iter()
                .any(|(_, bits, share)| bits == "4" && share == "25%")
        );
        let beaten: Vec<_> = layout
            .names
            .iter()
            .zip(&layout.looks)
            .filter(|&(_, &look)| look == Look::Beaten)
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(beaten, ["int4"]);
    }

    #[test]
    fn odd_sets_of_rows_are_drawn() {
        layout_of(&[]);
        layout_of(&[row("fp8", 8.0, 0.0125)]);
        layout_of(&[row("f32", 32.0, 0.0)]);
        layout_of(&[
            row("f32", 32.0, 0.0),
            row("f16", 16.0, 1e-4),
            row("int2", 4.0, 0.3),
        ]);
        layout_of(&[row("tiny", 4.0, f64::MIN_POSITIVE), row("huge", 4.0, 1e300)]);
        layout_of(&[
            row("int4c(8)/int4c(16)", 6.0, 0.04),
            row("int4c(16)/int4c(8)", 6.0, 0.04),
        ]);
        let twenty: Vec<_> = (0..20)
            .map(|i| row(&format!("int4c({i})/int2c({i})"), 4.0, 0.05))
            .collect();
        layout_of(&twenty);
    }

    #[test]
    fn a_pair_that_was_never_packed_is_named_so_and_beats_nobody() {
        let layout = layout_of(&[row("int2c(64)", 2.25, 1e-4), row("int4", 6.0, 0.04)]);
        assert_eq!(layout.names, ["int2c(64), unpacked", "int4"]);
        assert_eq!(layout.looks, [Look::Unpacked, Look::Best]);
        let svg = |rows: &[DriftRow]| String::from_utf8(drift_plot(rows, Picture::Svg).unwrap()).unwrap();
        let drawn = svg(&[row("int2c(64)", 2.25, 1e-4), row("int4", 6.0, 0.04)]);
        assert!(drawn.contains(Look::Unpacked.meaning()) && drawn.contains(Look::Best.meaning()));
        assert!(!drawn.contains(Look::Beaten.meaning()));
        let drawn = svg(&published());
        assert!(drawn.contains(Look::Beaten.meaning()) && !drawn.contains(Look::Unpacked.meaning()));
    }

    #[test]
    fn of_two_that_are_equal_neither_beats_the_other() {
        let layout = layout_of(&[row("int4", 6.0, 0.04), row("int4c(16)", 6.0, 0.04)]);
        assert_eq!(layout.looks, [Look::Best, Look::Best]);
    }

    #[test]
    fn the_legend_leaves_room_for_the_axis_beside_it() {
        let font = letters().unwrap();
        let taken: f64 = [Look::Unpacked, Look::Beaten, Look::Best]
            .iter()
            .map(|look| width(look.meaning(), NOTE_SIZE, &font) * WIDER + 36.0)
            .sum();
        let axis = width("logit drift, log scale", TICK_SIZE, &font) * WIDER;
        assert!(PLOT.left + axis < PLOT.right - taken, "{taken} and {axis}");
    }

    #[test]
    fn what_is_not_finite_is_refused() {
        for value in [f64::NAN, f64::INFINITY] {
            assert!(matches!(
                drift_plot(&[row("fp8", 8.0, value)], Picture::Svg),
                Err(Error::NonFinite { .. })
            ));
        }
    }

    #[test]
    fn an_svg_names_a_font_that_every_viewer_has_and_escapes_names() {
        let mut rows = published();
        rows[0].adapter = "<R&D> \u{1b}[1m".to_owned();
        let svg = String::from_utf8(drift_plot(&rows, Picture::Svg).unwrap()).unwrap();
        let fonts: Vec<_> = svg
            .match_indices("font-family=")
            .map(|(at, _)| &svg[at..at + 24])
            .collect();
        assert!(fonts.len() > 20 && fonts.iter().all(|&font| font == "font-family=\"sans-serif\""));
        for row in &rows {
            assert!(svg.contains(&row.pair), "{}", row.pair);
        }
        assert!(svg.contains("&lt;R&amp;D&gt;") && !svg.contains('\u{1b}'));
    }

    #[test]
    fn a_png_has_its_size_and_letters() {
        let bytes = drift_plot(&published(), Picture::Png).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (1920, 1200));
        // The title: some of its pixels are ink.
        let dark = (0..info.width as usize * 80)
            .filter(|&at| pixels[at * 3] < 80)
            .count();
        assert!(dark > 500, "{dark} dark pixels where the title is");
    }

    #[test]
    fn other_kinds_of_picture_are_refused_with_the_two_that_exist() {
        assert_eq!(Picture::of(Path::new("a/b.SVG")).unwrap(), Picture::Svg);
        assert_eq!(Picture::of(Path::new("b.png")).unwrap(), Picture::Png);
        for name in ["b.jpg", "b", ".svg", "-", "b.svg.gz"] {
            let message = Picture::of(Path::new(name)).unwrap_err().to_string();
            assert!(
                message.contains(name) && message.contains(".svg or .png"),
                "{message}"
            );
        }
    }

    #[test]
    fn long_names_are_shortened_to_their_room() {
        let font = letters().unwrap();
        let long = fitted(&"adapter ".repeat(100), NOTE_SIZE, 300.0, &font);
        assert!(long.ends_with('\u{2026}') && width(&long, NOTE_SIZE, &font) <= 300.0);
        assert_eq!(fitted("int4", LABEL_SIZE, 300.0, &font), "int4");
    }
}
