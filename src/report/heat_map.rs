//! A heat map: panels side by side, a row a layer, a column a format, the figure as colour on a logarithmic scale. SVG or
//! PNG.

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;

use super::labels::Rect;
use super::plot::{
    Canvas, Drawing, FAINT, INK, LABEL_SIZE, LEADER, NOTE_SIZE, PLOT, Picture, Scale, TICK_SIZE, drawn,
};
use super::table::digits;
use crate::error::{Error, Result};

/// What is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct HeatMap {
    /// The line above everything.
    pub title: String,
    /// Two lines below it.
    pub notes: [String; 2],
    /// What the colour stands for.
    pub figure: String,
    /// Side by side, with one scale of colours.
    pub panels: Vec<Panel>,
}

/// One of the panels.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// The line above it.
    pub title: String,
    /// Names of the rows, from the top.
    pub rows: Vec<String>,
    /// Names of the columns, from the left.
    pub columns: Vec<String>,
    /// `[row][column]`: finite and not negative; none is an empty cell.
    pub cells: Vec<Vec<Option<f64>>>,
}

/// Draws it.
///
/// # Errors
/// [`Error::Usage`] for cells that do not fit their rows and columns, [`Error::NonFinite`] for figures that are not
/// finite.
pub fn heat_map(map: &HeatMap, picture: Picture) -> Result<Vec<u8>> {
    drawn(&Layout::of(map)?, picture)
}

/// From least to most.
const COLORS: [RGBColor; 4] = [
    RGBColor(238, 244, 249),
    RGBColor(126, 179, 216),
    RGBColor(0, 94, 162),
    RGBColor(10, 28, 58),
];
/// A figure of exactly 0, which has no place on the scale.
const ZERO: RGBColor = RGBColor(255, 255, 255);
const PAPER: RGBColor = RGBColor(255, 255, 255);
/// Between panels, for the names of rows.
const BETWEEN: f64 = 64.0;
/// The bar of colours below the panels.
const LEGEND: Rect = Rect {
    left: PLOT.left,
    top: PLOT.bottom + 40.0,
    right: PLOT.left + 300.0,
    bottom: PLOT.bottom + 52.0,
};

struct Cell {
    rect: Rect,
    color: RGBColor,
    /// The figure and the colour of its letters, where there is room.
    text: Option<(String, RGBColor)>,
}

struct Label {
    text: String,
    at: (f64, f64),
    anchor: HPos,
    size: f64,
}

/// Where everything goes, in picture units.
struct Layout<'a> {
    map: &'a HeatMap,
    cells: Vec<Cell>,
    labels: Vec<Label>,
    frames: Vec<Rect>,
    ticks: Vec<(f64, String)>,
    figure_size: f64,
}

impl<'a> Layout<'a> {
    fn of(map: &'a HeatMap) -> Result<Layout<'a>> {
        let figures = || {
            map.panels
                .iter()
                .flat_map(|panel| panel.cells.iter().flatten().flatten())
        };
        let bad = figures().filter(|figure| !figure.is_finite());
        let nan = bad.clone().filter(|figure| figure.is_nan()).count() as u64;
        let bad = bad.count() as u64;
        if bad > 0 {
            return Err(Error::NonFinite {
                what: format!("the figures of {}", map.figure),
                nan,
                infinite: bad - nan,
            });
        }
        if map.panels.is_empty() || map.panels.iter().any(|panel| !panel.fits()) {
            return Err(Error::Usage {
                asked: "a heat map".to_owned(),
                reason: "it has no panels, or one without cells for its rows and columns".to_owned(),
                advice: "give each row a cell for each column".to_owned(),
            });
        }
        let scale = Scale::over(figures().copied().filter(|&figure| figure > 0.0), 1.0, 10.0);
        let count = map.panels.len() as f64;
        let width = (PLOT.right - PLOT.left - BETWEEN * (count - 1.0)) / count;
        let narrowest = map.panels.iter().map(|panel| width / panel.columns.len() as f64);
        let lowest = map
            .panels
            .iter()
            .map(|panel| (PLOT.bottom - PLOT.top) / panel.rows.len() as f64);
        let (narrowest, lowest) = (
            narrowest.fold(f64::MAX, f64::min),
            lowest.fold(f64::MAX, f64::min),
        );
        // Five letters and a little paper; nothing where that is too small to read.
        let figure_size = (lowest * 0.75).min(narrowest / 3.6).min(NOTE_SIZE);
        let mut layout = Layout {
            map,
            cells: Vec::new(),
            labels: Vec::new(),
            frames: Vec::new(),
            ticks: scale
                .decades(|value| scale.place(value, LEGEND.left, LEGEND.right))
                .0,
            figure_size,
        };
        for (i, panel) in map.panels.iter().enumerate() {
            let left = PLOT.left + i as f64 * (width + BETWEEN);
            let area = Rect {
                left,
                right: left + width,
                ..PLOT
            };
            layout.panel(panel, area, &scale);
        }
        Ok(layout)
    }

    fn panel(&mut self, panel: &Panel, area: Rect, scale: &Scale) {
        let (rows, columns) = (panel.rows.len() as f64, panel.columns.len() as f64);
        let (width, height) = (
            (area.right - area.left) / columns,
            (area.bottom - area.top) / rows,
        );
        let x = |column: usize| area.left + column as f64 * width;
        let y = |row: usize| area.top + row as f64 * height;
        self.labels.push(Label {
            text: panel.title.clone(),
            at: (area.left, area.top - 10.0),
            anchor: HPos::Left,
            size: LABEL_SIZE,
        });
        // Every row's name where there is room, else every second, fifth, tenth ...
        let every = [1, 2, 5, 10, 20, 50, 100, 200, 500]
            .into_iter()
            .find(|&every| every as f64 * height >= TICK_SIZE)
            .unwrap_or(1000);
        for (row, name) in panel.rows.iter().enumerate().step_by(every) {
            self.labels.push(Label {
                text: name.clone(),
                at: (area.left - 6.0, y(row) + height / 2.0 + TICK_SIZE * 0.36),
                anchor: HPos::Right,
                size: TICK_SIZE,
            });
        }
        for (column, name) in panel.columns.iter().enumerate() {
            // Longer names in smaller letters, neighbours a line apart where they are long.
            let size = (width * 1.7 / name.chars().count().max(1) as f64).clamp(8.0, TICK_SIZE);
            self.labels.push(Label {
                text: name.clone(),
                at: (x(column) + width / 2.0, area.bottom + 16.0),
                anchor: HPos::Center,
                size,
            });
        }
        for (row, cells) in panel.cells.iter().enumerate() {
            for (column, &figure) in cells.iter().enumerate() {
                let Some(figure) = figure else { continue };
                let share = scale.place(figure, 0.0, 1.0);
                let color = if figure > 0.0 { color(share) } else { ZERO };
                let letters = if figure > 0.0 && share > 0.5 { PAPER } else { INK };
                let text = (self.figure_size >= 6.0).then(|| (short(figure), letters));
                self.cells.push(Cell {
                    rect: Rect {
                        left: x(column),
                        top: y(row),
                        right: x(column + 1),
                        bottom: y(row + 1),
                    },
                    color,
                    text,
                });
            }
        }
        self.frames.push(area);
    }
}

impl Panel {
    fn fits(&self) -> bool {
        !self.rows.is_empty()
            && !self.columns.is_empty()
            && self.cells.len() == self.rows.len()
            && self.cells.iter().all(|cells| cells.len() == self.columns.len())
    }
}

impl Drawing for Layout<'_> {
    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<()> {
        let [first, second] = &self.map.notes;
        canvas.head(&self.map.title, [first, second])?;
        for cell in &self.cells {
            canvas.bar(cell.rect, cell.color)?;
            if let Some((text, color)) = &cell.text {
                let (x, y) = cell.rect.centre();
                let at = (x, y + self.figure_size * 0.36);
                canvas.text(text, at, self.figure_size, *color, HPos::Center)?;
            }
        }
        for frame in &self.frames {
            outline(canvas, *frame)?;
        }
        for label in &self.labels {
            canvas.text(&label.text, label.at, label.size, INK, label.anchor)?;
        }
        let steps = 100;
        for step in 0..steps {
            let x =
                |step: i32| LEGEND.left + (LEGEND.right - LEGEND.left) * f64::from(step) / f64::from(steps);
            let rect = Rect {
                left: x(step),
                right: x(step + 1),
                ..LEGEND
            };
            canvas.bar(rect, color((f64::from(step) + 0.5) / f64::from(steps)))?;
        }
        outline(canvas, LEGEND)?;
        for (x, text) in &self.ticks {
            canvas.text(text, (*x, LEGEND.bottom + 15.0), NOTE_SIZE, FAINT, HPos::Center)?;
        }
        let at = (LEGEND.right + 16.0, LEGEND.centre().1 + TICK_SIZE * 0.36);
        canvas.text(
            &format!("{}, log scale", self.map.figure),
            at,
            TICK_SIZE,
            INK,
            HPos::Left,
        )?;
        canvas.present()
    }
}

fn outline<B: DrawingBackend>(canvas: &Canvas<B>, rect: Rect) -> Result<()> {
    let corners = [
        (rect.left, rect.top),
        (rect.right, rect.top),
        (rect.right, rect.bottom),
        (rect.left, rect.bottom),
        (rect.left, rect.top),
    ];
    canvas.line(&corners, 1.0, LEADER)
}

/// The colour of a share of the scale, from 0 to 1.
fn color(share: f64) -> RGBColor {
    let place = share.clamp(0.0, 1.0) * (COLORS.len() - 1) as f64;
    let index = (place as usize).min(COLORS.len() - 2);
    let part = place - index as f64;
    let (RGBColor(a, b, c), RGBColor(d, e, f)) = (COLORS[index], COLORS[index + 1]);
    let mix = |from: u8, to: u8| (f64::from(from) + part * (f64::from(to) - f64::from(from))).round() as u8;
    RGBColor(mix(a, d), mix(b, e), mix(c, f))
}

/// Two significant digits in five letters or so.
fn short(figure: f64) -> String {
    let rounded: f64 = format!("{figure:.1e}").parse().unwrap_or(figure);
    digits(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rows: usize, columns: usize) -> HeatMap {
        let panel = |title: &str| Panel {
            title: title.to_owned(),
            rows: (0..rows).map(|row| row.to_string()).collect(),
            columns: (0..columns).map(|column| format!("int{column}c(16)")).collect(),
            cells: (0..rows)
                .map(|row| {
                    (0..columns)
                        .map(|column| Some(0.001 * (1 + row + 7 * column) as f64))
                        .collect()
                })
                .collect(),
        };
        HeatMap {
            title: "Errors".to_owned(),
            notes: ["a".to_owned(), "b".to_owned()],
            figure: "relative L2".to_owned(),
            panels: vec![panel("K"), panel("V")],
        }
    }

    #[test]
    fn colours_go_from_light_to_dark() {
        let light = |share| {
            let RGBColor(r, g, b) = color(share);
            u32::from(r) + u32::from(g) + u32::from(b)
        };
        let mut last = u32::MAX;
        for step in 0..=20 {
            let next = light(f64::from(step) / 20.0);
            assert!(next < last, "{step}");
            last = next;
        }
        assert_eq!((color(-1.0), color(2.0)), (COLORS[0], COLORS[3]));
    }

    #[test]
    fn cells_fill_their_panels_and_the_worst_is_darkest() {
        let drawn = map(4, 3);
        let layout = Layout::of(&drawn).unwrap();
        assert_eq!(layout.cells.len(), 2 * 12);
        assert_eq!(layout.cells[0].color, COLORS[0]);
        assert_eq!(layout.cells[11].color, COLORS[3]);
        let (first, last) = (layout.cells[0].rect, layout.cells[23].rect);
        assert_eq!((first.left, first.top), (PLOT.left, PLOT.top));
        assert!((last.right - PLOT.right).abs() < 1e-9 && (last.bottom - PLOT.bottom).abs() < 1e-9);
        assert_eq!(layout.cells[0].text.as_ref().unwrap().0, "0.001");
    }

    #[test]
    fn many_rows_have_fewer_names_and_no_figures() {
        let drawn = map(300, 3);
        let layout = Layout::of(&drawn).unwrap();
        assert!(layout.cells.iter().all(|cell| cell.text.is_none()));
        let names = layout
            .labels
            .iter()
            .filter(|label| label.at.0 < PLOT.left)
            .count();
        assert!((10..=31).contains(&names), "{names}");
    }

    #[test]
    fn figures_without_a_place_are_drawn_or_refused() {
        let mut drawn = map(2, 2);
        drawn.panels[0].cells[0] = vec![Some(0.0), None];
        let layout = Layout::of(&drawn).unwrap();
        assert_eq!((layout.cells.len(), layout.cells[0].color), (7, ZERO));
        drawn.panels[0].cells[0] = vec![Some(f64::NAN), Some(f64::INFINITY)];
        assert!(matches!(
            heat_map(&drawn, Picture::Svg),
            Err(Error::NonFinite {
                nan: 1,
                infinite: 1,
                ..
            })
        ));
        drawn.panels[0].cells.pop();
        drawn.panels[0].cells[0] = vec![Some(1.0), None];
        assert!(matches!(heat_map(&drawn, Picture::Svg), Err(Error::Usage { .. })));
    }

    #[test]
    fn both_kinds_of_file_are_written() {
        let svg = String::from_utf8(heat_map(&map(3, 2), Picture::Svg).unwrap()).unwrap();
        assert!(svg.contains("relative L2, log scale") && svg.contains("int1c(16)"));
        assert!(
            heat_map(&map(3, 2), Picture::Png)
                .unwrap()
                .starts_with(b"\x89PNG")
        );
    }
}
