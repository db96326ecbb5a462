// Package family finds, kills and reaps the descendants of this process (Linux).
// Orphans among them belong to it, because the process is a child subreaper.
//
// The launcher uses it between two generations of workers, its guard after the
// launcher's death. The guard runs before other packages are initialised, so this
// one imports little and has nothing to initialise.
package family
