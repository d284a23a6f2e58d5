//! The benchmark's picture: time of a layer against the context on the left, a line a pair; bandwidth on the right, a bar
//! a pair at the longest context, beside the read roof.

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;

use super::labels::Rect;
use super::plot::{
    Canvas, Drawing, FAINT, FINE_GRID, GRID, INK, LABEL_SIZE, LEADER, NOTE_SIZE, PLOT, POINT, Picture, Scale,
    TICK_SIZE, drawn,
};
use super::table::digits;
use crate::bench::{BenchReport, BenchRow, Work};
use crate::error::{Error, Result};

/// Lines, on the left; their labels stand between the two parts.
const LINES: Rect = Rect {
    left: PLOT.left,
    top: PLOT.top,
    right: 430.0,
    bottom: PLOT.bottom,
};
/// Bars, on the right.
const BARS: Rect = Rect {
    left: 640.0,
    top: PLOT.top,
    right: PLOT.right - 60.0,
    bottom: PLOT.bottom,
};
/// Labels that stand below each other are so far apart.
const APART: f64 = 17.0;
const ROOF: RGBColor = RGBColor(178, 60, 23);
/// Bars of rows that are no figures of memory.
const PALE: RGBColor = RGBColor(176, 196, 214);
/// One colour a line, told apart by dark and light too; used again from the start beyond eight.
const COLORS: [RGBColor; 8] = [
    RGBColor(32, 36, 44),
    RGBColor(0, 94, 162),
    RGBColor(178, 60, 23),
    RGBColor(34, 120, 68),
    RGBColor(122, 62, 157),
    RGBColor(190, 132, 0),
    RGBColor(0, 140, 150),
    RGBColor(200, 70, 130),
];

/// Draws a report. Figures that are not finite are an error.
pub fn bench_plot(report: &BenchReport, picture: Picture) -> Result<Vec<u8>> {
    drawn(&Layout::of(report)?, picture)
}

/// One pair's line: its points, its label and where that stands.
struct Line {
    name: String,
    color: RGBColor,
    points: Vec<(f64, f64)>,
    label_y: f64,
}

/// One pair's bar.
struct Bar {
    name: String,
    rect: Rect,
    color: RGBColor,
    figure: String,
}

/// Where everything goes, in picture units.
struct Layout {
    title: String,
    notes: [String; 2],
    lines: Vec<Line>,
    x_ticks: Vec<(f64, String)>,
    y_ticks: Vec<(f64, String)>,
    fine: Vec<f64>,
    bars: Vec<Bar>,
    bars_title: String,
    /// Its place, and what it says.
    roof: Option<(f64, String)>,
}

impl Layout {
    fn of(report: &BenchReport) -> Result<Layout> {
        let rows = &report.rows;
        let bad = rows
            .iter()
            .filter(|row| !(row.seconds > 0.0 && row.seconds.is_finite()));
        let bad = bad.count() as u64;
        if bad > 0 {
            return Err(Error::NonFinite {
                what: "the times of the rows".to_owned(),
                nan: bad,
                infinite: 0,
            });
        }
        let x = Scale::over(rows.iter().map(|row| f64::from(row.context)), 1.15, 4.0);
        let y = Scale::over(rows.iter().map(|row| row.seconds * 1e3), 1.3, 10.0);
        let x_of = |row: &BenchRow| x.place(f64::from(row.context), LINES.left, LINES.right);
        let y_of = |ms: f64| y.place(ms, LINES.bottom, LINES.top);
        let mut lines: Vec<Line> = Vec::new();
        for row in rows {
            let point = (x_of(row), y_of(row.seconds * 1e3));
            match lines.iter_mut().find(|line| line.name == row.pair) {
                Some(line) => line.points.push(point),
                None => lines.push(Line {
                    name: row.pair.clone(),
                    color: COLORS[lines.len() % COLORS.len()],
                    points: vec![point],
                    label_y: 0.0,
                }),
            }
        }
        for line in &mut lines {
            line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        spread(&mut lines);
        let mut x_ticks: Vec<(f64, String)> = rows
            .iter()
            .map(|row| (x_of(row), row.context.to_string()))
            .collect();
        x_ticks.sort_by(|a, b| a.0.total_cmp(&b.0));
        x_ticks.dedup_by(|a, b| (a.0 - b.0).abs() < 44.0);
        let (y_ticks, fine) = y.decades(y_of);
        let longest = rows.iter().map(|row| row.context).max().unwrap_or(0);
        let (bars, roof) = bars(report, longest);
        let work = rows.first().map_or(Work::Decode, |row| row.work);
        let unit = match (work, report.header.software) {
            (Work::Prefill, _) => "thousand tokens/s of one layer",
            (_, true) => "GB/s of the CPU (software driver)",
            (_, false) => "GB/s",
        };
        let header = &report.header;
        Ok(Layout {
            title: format!("kvpack bench {work}"),
            notes: [
                format!("{}, batch {}; {}", header.shape, header.batch, header.timing),
                format!(
                    "{}{} ({}, {})",
                    if header.software { "software: " } else { "" },
                    header.adapter,
                    header.backend,
                    header.driver
                ),
            ],
            lines,
            x_ticks,
            y_ticks,
            fine,
            bars,
            bars_title: format!("{unit} at {longest} tokens"),
            roof,
        })
    }
}

/// Gives the labels of lines places beside their last points, none over another.
fn spread(lines: &mut [Line]) {
    let end = |line: &Line| line.points.last().map_or(0.0, |point| point.1);
    let mut order: Vec<usize> = (0..lines.len()).collect();
    order.sort_by(|&a, &b| end(&lines[a]).total_cmp(&end(&lines[b])));
    let mut last = f64::MIN;
    for &i in &order {
        last = end(&lines[i]).max(last + APART);
        lines[i].label_y = last;
    }
    // Those that were pushed out at the bottom push the others up.
    let mut limit = LINES.bottom;
    for &i in order.iter().rev() {
        lines[i].label_y = lines[i].label_y.min(limit);
        limit = lines[i].label_y - APART;
    }
}

fn bars(report: &BenchReport, context: u32) -> (Vec<Bar>, Option<(f64, String)>) {
    let rows: Vec<_> = report.rows.iter().filter(|row| row.context == context).collect();
    let value = |row: &BenchRow| match row.work {
        Work::Prefill => row.tokens_per_s / 1e3,
        _ => row.gb_per_s,
    };
    let roof = report.roofs.first();
    let believed = rows.iter().filter(|row| !row.above_roof).map(|row| value(row));
    let most = believed.chain(roof.map(|roof| roof.gb_per_s)).fold(0.0, f64::max);
    let most = if most > 0.0 { most * 1.08 } else { 1.0 };
    let width = BARS.right - BARS.left;
    let height = (BARS.bottom - BARS.top) / rows.len().max(1) as f64;
    let bars = rows.iter().enumerate().map(|(i, row)| {
        let top = BARS.top + height * i as f64;
        let thick = (height * 0.62).min(30.0);
        let middle = top + height / 2.0;
        Bar {
            name: row.pair.clone(),
            rect: Rect {
                left: BARS.left,
                top: middle - thick / 2.0,
                right: BARS.left + (value(row) / most).min(1.0) * width,
                bottom: middle + thick / 2.0,
            },
            color: if row.above_roof || row.cache_resident && row.work == Work::Decode {
                PALE
            } else {
                POINT
            },
            figure: if row.above_roof {
                "not believed".to_owned()
            } else {
                digits(value(row))
            },
        }
    });
    let roof = roof.map(|roof| {
        let at = BARS.left + roof.gb_per_s / most * width;
        (at, format!("read roof {:.1}", roof.gb_per_s))
    });
    (bars.collect(), roof)
}

impl Drawing for Layout {
    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<()> {
        canvas.head(&self.title, [&self.notes[0], &self.notes[1]])?;
        let axis = |text: &str, x: f64| canvas.text(text, (x, PLOT.top - 10.0), TICK_SIZE, INK, HPos::Left);
        axis("ms of one layer, log scale", LINES.left)?;
        axis(&self.bars_title, BARS.left)?;
        for &y in &self.fine {
            canvas.line(&[(LINES.left, y), (LINES.right, y)], 1.0, FINE_GRID)?;
        }
        for (y, label) in &self.y_ticks {
            canvas.line(&[(LINES.left, *y), (LINES.right, *y)], 1.0, GRID)?;
            let at = (LINES.left - 8.0, y + TICK_SIZE * 0.36);
            canvas.text(label, at, TICK_SIZE, FAINT, HPos::Right)?;
        }
        for (x, label) in &self.x_ticks {
            canvas.line(&[(*x, LINES.top), (*x, LINES.bottom)], 1.0, GRID)?;
            canvas.text(label, (*x, LINES.bottom + 19.0), TICK_SIZE, INK, HPos::Center)?;
        }
        let below = (LINES.left, LINES.bottom + 42.0);
        canvas.text(
            "tokens of a sequence, log scale",
            below,
            TICK_SIZE,
            INK,
            HPos::Left,
        )?;
        for line in &self.lines {
            canvas.line(&line.points, 2.0, line.color)?;
            for &point in &line.points {
                canvas.disc(point, 4.0, line.color)?;
            }
            let (x, y) = line.points.last().copied().unwrap_or_default();
            let label = LINES.right + 14.0;
            canvas.line(&[(x + 6.0, y), (label - 4.0, line.label_y)], 1.0, LEADER)?;
            let at = (label, line.label_y + LABEL_SIZE * 0.36);
            canvas.text(&line.name, at, LABEL_SIZE, line.color, HPos::Left)?;
        }
        for bar in &self.bars {
            let middle = (bar.rect.top + bar.rect.bottom) / 2.0;
            canvas.bar(bar.rect, bar.color)?;
            let at = (BARS.left - 8.0, middle + LABEL_SIZE * 0.36);
            canvas.text(&bar.name, at, LABEL_SIZE, INK, HPos::Right)?;
            let at = (bar.rect.right + 6.0, middle + NOTE_SIZE * 0.36);
            canvas.text(&bar.figure, at, NOTE_SIZE, INK, HPos::Left)?;
        }
        canvas.line(&[(BARS.left, BARS.top), (BARS.left, BARS.bottom)], 1.0, LEADER)?;
        if let Some((x, label)) = &self.roof {
            canvas.line(&[(*x, BARS.top), (*x, BARS.bottom + 6.0)], 1.5, ROOF)?;
            canvas.text(label, (*x, BARS.bottom + 19.0), TICK_SIZE, ROOF, HPos::Center)?;
        }
        canvas.present()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    #[test]
    fn labels_of_lines_keep_apart_and_inside() {
        let mut report = examples::bench();
        let rows = report.rows.clone();
        report.rows = (0..24)
            .map(|i| BenchRow {
                pair: format!("pair {i}"),
                ..rows[i % rows.len()].clone()
            })
            .collect();
        let layout = Layout::of(&report).unwrap();
        let mut places: Vec<f64> = layout.lines.iter().map(|line| line.label_y).collect();
        places.sort_by(f64::total_cmp);
        assert_eq!(places.len(), 24);
        assert!(places.windows(2).all(|two| two[1] - two[0] > APART - 1e-9));
        assert!(
            places[0] > LINES.top - 20.0 && places[23] <= LINES.bottom,
            "{places:?}"
        );
    }

    #[test]
    fn bars_end_below_the_roof_and_what_is_not_believed_is_said() {
        let layout = Layout::of(&examples::bench()).unwrap();
        let (roof, label) = layout.roof.unwrap();
        assert!(roof < BARS.right && label.contains("2.7"), "{label}");
        for bar in &layout.bars {
            assert!(bar.rect.right <= BARS.right && (bar.figure == "not believed") == (bar.name == "int2"));
        }
        let svg = bench_plot(&examples::bench(), Picture::Svg).unwrap();
        let svg = String::from_utf8(svg).unwrap();
        assert!(svg.contains("not believed") && svg.contains("read roof") && svg.contains("int4"));
        assert!(bench_plot(&examples::bench(), Picture::Png).unwrap().len() > 10_000);
    }

    #[test]
    fn times_that_are_no_numbers_are_refused() {
        for seconds in [f64::NAN, f64::INFINITY, 0.0] {
            let mut report = examples::bench();
            report.rows[0].seconds = seconds;
            assert!(bench_plot(&report, Picture::Svg).is_err());
        }
        let mut none = examples::bench();
        none.rows.clear();
        bench_plot(&none, Picture::Svg).unwrap();
    }
}
