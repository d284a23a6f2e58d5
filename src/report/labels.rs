//! Where the labels of a scatter plot go, so that none covers another, a point or the border.

/// A place in the picture, y downwards.
pub type Point = (f64, f64);

/// An upright rectangle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rect {
    /// Left edge.
    pub left: f64,
    /// Top edge.
    pub top: f64,
    /// Right edge.
    pub right: f64,
    /// Bottom edge.
    pub bottom: f64,
}

impl Rect {
    fn around(centre: Point, (width, height): Point) -> Rect {
        let (x, y) = centre;
        Rect {
            left: x - width / 2.0,
            top: y - height / 2.0,
            right: x + width / 2.0,
            bottom: y + height / 2.0,
        }
    }

    /// The middle.
    pub fn centre(self) -> Point {
        ((self.left + self.right) / 2.0, (self.top + self.bottom) / 2.0)
    }

    fn grown(self, by: f64) -> Rect {
        Rect {
            left: self.left - by,
            top: self.top - by,
            right: self.right + by,
            bottom: self.bottom + by,
        }
    }

    fn inside(self, outer: Rect) -> bool {
        self.left >= outer.left
            && self.right <= outer.right
            && self.top >= outer.top
            && self.bottom <= outer.bottom
    }

    fn overlaps(self, other: Rect) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    /// The place of the rectangle that is nearest to a point.
    pub fn nearest(self, (x, y): Point) -> Point {
        (x.clamp(self.left, self.right), y.clamp(self.top, self.bottom))
    }

    /// Whether the line between two points touches the rectangle (clipping the line to one edge after the other).
    fn crossed_by(self, (from, to): (Point, Point)) -> bool {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let (mut enter, mut leave) = (0.0_f64, 1.0_f64);
        let edges = [
            (-dx, from.0 - self.left),
            (dx, self.right - from.0),
            (-dy, from.1 - self.top),
            (dy, self.bottom - from.1),
        ];
        for (direction, distance) in edges {
            if direction == 0.0 {
                if distance < 0.0 {
                    return false;
                }
            } else if direction < 0.0 {
                enter = enter.max(distance / direction);
            } else {
                leave = leave.min(distance / direction);
            }
        }
        enter <= leave
    }
}

/// A label that has found its place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placed {
    /// The box of the text.
    pub rect: Rect,
    /// The line from the point's edge to the box, where the box is not beside its point.
    pub leader: Option<(Point, Point)>,
}

/// Free space round a label and round a point, in pixels.
const GAP: f64 = 3.0;
/// The distance between a point and its label up to which no leader is needed, as a share of the point's radius.
const BESIDE: f64 = 2.2;

/// A place for each label: beside its point where there is room, else farther with a leader. None where the whole area
/// has no room left. No two boxes overlap, none covers a point, and all lie inside `area`.
pub fn place(points: &[Point], sizes: &[Point], radius: f64, area: Rect) -> Vec<Option<Placed>> {
    let crowd = |i: usize| {
        let (x, y) = points[i];
        let near = |&&(a, b): &&Point| (a - x).abs() < 120.0 && (b - y).abs() < 50.0;
        points.iter().filter(near).count()
    };
    // The most crowded first: they have the least choice.
    let mut order: Vec<usize> = (0..points.len().min(sizes.len())).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(crowd(i)));

    let mut placed: Vec<Option<Placed>> = vec![None; points.len()];
    for &i in &order {
        placed[i] = best(i, points, sizes[i], radius, area, &placed);
    }
    // A second look, each with all the others in place, undoes what the order made worse.
    for &i in &order {
        let before = placed[i].take();
        placed[i] = best(i, points, sizes[i], radius, area, &placed).or(before);
    }
    placed
}

fn best(
    i: usize,
    points: &[Point],
    size: Point,
    radius: f64,
    area: Rect,
    placed: &[Option<Placed>],
) -> Option<Placed> {
    let legal = |rect: Rect| {
        rect.inside(area)
            && placed
                .iter()
                .flatten()
                .all(|other| !rect.grown(GAP).overlaps(other.rect))
            && points.iter().all(|&point| {
                !rect.overlaps(Rect::around(point, (2.0 * (radius + GAP), 2.0 * (radius + GAP))))
            })
    };
    let cheapest = |candidates: &mut dyn Iterator<Item = Rect>| {
        candidates
            .filter(|&rect| legal(rect))
            .map(|rect| (rect, cost(i, rect, points, radius, placed)))
            .min_by(|(_, (a, _)), (_, (b, _))| a.total_cmp(b))
            .map(|(rect, (cost, leader))| (cost, Placed { rect, leader }))
    };
    let near = cheapest(&mut ring(points[i], size, radius));
    // All over the area, asked only where no place round the point will do.
    let far = match near {
        Some((cost, _)) if cost < CROSSING => None,
        _ => cheapest(&mut grid(size, area)),
    };
    near.into_iter()
        .chain(far)
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, placed)| placed)
}

/// Distances from the edge of the point to the box, and directions, right and left first: they read best.
const DISTANCES: [f64; 11] = [0.6, 1.4, 2.4, 4.0, 6.0, 9.0, 12.0, 16.0, 20.0, 26.0, 34.0];
const DIRECTIONS: u32 = 24;
/// What a crossed line costs: more than any way round.
const CROSSING: f64 = 10_000.0;

fn ring((x, y): Point, (width, height): Point, radius: f64) -> impl Iterator<Item = Rect> {
    DISTANCES.into_iter().flat_map(move |distance| {
        (0..DIRECTIONS).map(move |k| {
            let (sin, cos) = (f64::from(k) / f64::from(DIRECTIONS) * std::f64::consts::TAU).sin_cos();
            let reach = radius * (1.0 + distance) + GAP;
            Rect::around(
                (x + cos * (reach + width / 2.0), y - sin * (reach + height / 2.0)),
                (width, height),
            )
        })
    })
}

fn grid((width, height): Point, area: Rect) -> impl Iterator<Item = Rect> {
    let columns = ((area.right - area.left) / (width / 4.0).max(1.0)) as u32;
    let rows = ((area.bottom - area.top) / (height / 2.0).max(1.0)) as u32;
    (0..rows).flat_map(move |row| {
        (0..columns).map(move |column| {
            let (left, top) = (
                area.left + f64::from(column) * width / 4.0,
                area.top + f64::from(row) * height / 2.0,
            );
            Rect {
                left,
                top,
                right: left + width,
                bottom: top + height,
            }
        })
    })
}

fn cost(
    i: usize,
    rect: Rect,
    points: &[Point],
    radius: f64,
    placed: &[Option<Placed>],
) -> (f64, Option<(Point, Point)>) {
    let (x, y) = points[i];
    let end = rect.nearest((x, y));
    let distance = (end.0 - x).hypot(end.1 - y);
    let crosses_a_leader = |rect: Rect| {
        let crossed = |other: &Placed| other.leader.is_some_and(|line| rect.grown(1.0).crossed_by(line));
        placed.iter().flatten().filter(|other| crossed(other)).count()
    };
    let mut crossings = crosses_a_leader(rect);
    // A box nearer to another point than to its own is read as the other's.
    let nearer = |&(a, b): &Point| {
        let other = rect.nearest((a, b));
        (a, b) != (x, y) && (other.0 - a).hypot(other.1 - b) < distance
    };
    let mistaken = points.iter().filter(|point| nearer(point)).count();
    let leader = (distance > radius * BESIDE + GAP).then(|| {
        let edge = (radius + 1.0) / distance;
        let start = (x + (end.0 - x) * edge, y + (end.1 - y) * edge);
        (start, end)
    });
    if let Some(line) = leader {
        crossings += placed
            .iter()
            .flatten()
            .filter(|other| other.rect.grown(1.0).crossed_by(line))
            .count();
        crossings += placed
            .iter()
            .flatten()
            .filter_map(|other| other.leader)
            .filter(|&other| cross(line, other))
            .count();
        let hit = |&(a, b): &Point| {
            (a, b) != (x, y)
                && Rect::around((a, b), (2.0 * radius + GAP, 2.0 * radius + GAP)).crossed_by(line)
        };
        crossings += points.iter().filter(|point| hit(point)).count();
    }
    // Level with the point reads best, right better than left and above better than below.
    let (centre, half) = (rect.centre(), (rect.right - rect.left) / 2.0);
    let level = (centre.1 - y).abs() / (rect.bottom - rect.top);
    let left = f64::from(centre.0 < x - half * 0.5);
    let below = f64::from(centre.1 > y + 1.0);
    let taste = 6.0 * level.min(2.0) + 2.0 * left + 1.0 * below;
    let far = if leader.is_some() { 25.0 } else { 0.0 };
    let misread = if leader.is_some() { 5.0 } else { 40.0 };
    (
        distance + taste + far + mistaken as f64 * misread + crossings as f64 * CROSSING,
        leader,
    )
}

/// Whether two lines cross.
fn cross((a, b): (Point, Point), (c, d): (Point, Point)) -> bool {
    let side = |p: Point, q: Point, r: Point| (q.0 - p.0) * (r.1 - p.1) - (q.1 - p.1) * (r.0 - p.0);
    side(a, b, c) * side(a, b, d) < 0.0 && side(c, d, a) * side(c, d, b) < 0.0
}

/// What is wrong with a placement; empty when nothing is.
#[cfg(test)]
pub fn faults(placed: &[Option<Placed>], points: &[Point], radius: f64, area: Rect) -> Vec<String> {
    let mut faults = Vec::new();
    let boxes: Vec<_> = placed.iter().flatten().map(|placed| placed.rect).collect();
    for (i, a) in boxes.iter().enumerate() {
        if !a.inside(area) {
            faults.push(format!("{a:?} is not inside {area:?}"));
        }
        for b in &boxes[i + 1..] {
            if a.overlaps(*b) {
                faults.push(format!("{a:?} and {b:?} overlap"));
            }
        }
        for &point in points {
            if a.overlaps(Rect::around(point, (2.0 * radius, 2.0 * radius))) {
                faults.push(format!("{a:?} covers the point {point:?}"));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AREA: Rect = Rect {
        left: 80.0,
        top: 90.0,
        right: 940.0,
        bottom: 530.0,
    };

    fn check(points: &[Point], sizes: &[Point]) {
        let placed = place(points, sizes, 5.0, AREA);
        assert!(placed.iter().all(Option::is_some), "a label found no room");
        let faults = faults(&placed, points, 5.0, AREA);
        assert!(faults.is_empty(), "{faults:?}");
    }

    proptest! {
        #[test]
        fn labels_never_overlap_each_other_points_or_the_border(
            items in prop::collection::vec((80.0..940.0_f64, 90.0..530.0_f64, 20.0..170.0_f64), 1..24),
        ) {
            let points: Vec<_> = items.iter().map(|&(x, y, _)| (x, y)).collect();
            let sizes: Vec<_> = items.iter().map(|&(_, _, width)| (width, 18.0)).collect();
            check(&points, &sizes);
        }

        #[test]
        fn nor_when_points_crowd_on_one_spot(
            spot in (80.0..940.0_f64, 90.0..530.0_f64),
            items in prop::collection::vec((0.0..12.0_f64, 0.0..12.0_f64, 20.0..170.0_f64), 1..24),
        ) {
            let clamp = |x: f64, y: f64| (x.min(940.0), y.min(530.0));
            let points: Vec<_> = items.iter().map(|&(x, y, _)| clamp(spot.0 + x, spot.1 + y)).collect();
            let sizes: Vec<_> = items.iter().map(|&(_, _, width)| (width, 18.0)).collect();
            check(&points, &sizes);
        }
    }

    #[test]
    fn twenty_equal_points_each_get_a_label() {
        check(&[(500.0, 300.0); 20], &[(110.0, 18.0); 20]);
    }

    #[test]
    fn a_lone_point_has_its_label_beside_it_without_a_leader() {
        let placed = place(&[(500.0, 300.0)], &[(60.0, 18.0)], 5.0, AREA)[0].unwrap();
        assert_eq!(placed.leader, None);
        assert!(placed.rect.left > 505.0 && (placed.rect.centre().1 - 300.0).abs() < 1e-9);
    }

    #[test]
    fn a_full_area_leaves_labels_out_and_the_checker_sees_faults() {
        let small = Rect {
            left: 0.0,
            top: 0.0,
            right: 100.0,
            bottom: 40.0,
        };
        let points = [(50.0, 20.0); 9];
        let placed = place(&points, &[(45.0, 14.0); 9], 3.0, small);
        assert!(placed.iter().any(Option::is_none));
        assert!(faults(&placed, &points, 3.0, small).is_empty());

        let at = |left| {
            Some(Placed {
                rect: Rect {
                    left,
                    top: 0.0,
                    right: left + 30.0,
                    bottom: 9.0,
                },
                leader: None,
            })
        };
        assert_eq!(faults(&[at(0.0), at(20.0)], &[], 3.0, small).len(), 1);
        assert_eq!(faults(&[at(80.0)], &[], 3.0, small).len(), 1);
        assert_eq!(faults(&[at(0.0)], &[(5.0, 5.0)], 3.0, small).len(), 1);
    }
}
