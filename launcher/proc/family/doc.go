// Package family finds, kills and reaps the descendants of this process (Linux).
// Orphans among them belong to it, because the process is a child subreaper. The
// launcher uses it between two generations of workers, its guard after the launcher's
// death.
package family
